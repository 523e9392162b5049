"""A plan that changes while its module trains: the same training, the same names, and the new plan is what is run."""

import dataclasses
import random
from collections import Counter
from contextlib import contextmanager, nullcontext

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPPrecision, OSDPStrategy, change_plan, profile_model
from lightning_osdp.apply import ShardedModel
from lightning_osdp.apply.internals import access, gathering
from lightning_osdp.callbacks.peak import living_tensors
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from lightning_osdp.core.axes import ACTIVATION_CHOICES, Treatment
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.planner.engine import engine_of
from lightning_osdp.planner.simulation import planned_step
from lightning_osdp.profiler import LiveBytes
from tests.distributed.support.fits import failure, shared_folder, stated_cluster, trainer
from tests.distributed.support.parts import (
    BLOCKS,
    CPU,
    KEPT,
    MICRO_BATCHES,
    STEPS,
    UNITS,
    Net,
    Pair,
    Run,
    apart,
    base_plan,
    batches_by_step,
    batches_of,
    ddp,
    module_of,
    trained,
    with_sync,
)
from tests.support.tiers import slow
from tests.support.wrapped_units import block_forwards

pytestmark = pytest.mark.distributed

NESTED = (["pair"], ["pair", "alone"], BLOCKS, BLOCKS[:1], [])
"""Blocks that do not keep what they save: none inside another at a time."""


def _with_modes(plan, draw):
    units = [
        unit.in_modes(*(tuple(draw.choice(["ZDP", "DP"]) for _ in unit.modes) if unit.name else ("DP",)))
        for unit in plan.units
    ]
    return dataclasses.replace(plan, units=tuple(units))


def _with_sync(plan, draw):
    units = [unit.treated(sync=draw.choice(["every", "last"]) if unit.name else "every") for unit in plan.units]
    return dataclasses.replace(plan, units=tuple(units))


def _with_blocks(plan, draw, choices=None):
    if choices is None:  # blocks with slices inside are at no level
        levels = () if any(len(unit.treatments) > 1 for unit in plan.units) else KEPT
        choices = (*ACTIVATION_CHOICES[1:], *levels)
    chosen = {name: draw.choice(choices) for name in draw.choice(NESTED)}
    blocks = (
        Block(name=name, treatment=Treatment(saves=choice), kept=KEPT.get(choice, ()))
        for name, choice in chosen.items()
    )
    return dataclasses.replace(plan, blocks=tuple(blocks))


def _with_prefetch(plan, draw):
    return dataclasses.replace(
        plan, backward_prefetch=draw.choice(["pre", "none"]), forward_prefetch=draw.choice([True, False])
    )


def _with_asynchronous(plan, draw):
    return dataclasses.replace(plan, asynchronous_unshard=not plan.asynchronous_unshard)


KINDS = {
    "modes": _with_modes,
    "sync": _with_sync,
    "blocks": _with_blocks,
    "prefetch": _with_prefetch,
    "asynchronous": _with_asynchronous,
}


def changed(plan, kinds, seed):
    """Changes a plan in these kinds."""
    draw = random.Random(seed)
    for kind in kinds:
        plan = KINDS[kind](plan, draw)
    return plan


def differences(kinds, seed, *, units, slices=False, sync="every"):
    """Trains a module whose plan changes after each step, there and back, beside one that keeps its plan, and DDP.

    Returns:
        Largest differences, and whether all names are those of the plan that was kept.
    """
    plan = with_sync(base_plan(units, slices=slices), sync)
    changes = [plan if step % 3 == 2 else changed(plan, kinds, repr((seed, step))) for step in range(STEPS - 1)]
    assert len({each.to_json() for each in changes}) > 1
    expected, names = trained(plan)
    found, names_found = trained(plan, changes)
    all_names = [*names, *names_found]
    return apart(found, expected), apart(found, ddp()), all(each == all_names[0] for each in all_names)


# ---- what is run


@contextmanager
def noted(run):
    """Collectives of units, in order."""
    seen = []
    groups = [(access.group_of(unit.handle), unit.name) for unit in run.model.units]
    for group, name in groups:
        if group is not None:
            gathering.on_collectives(group, lambda is_reduction, name=name: seen.append((is_reduction, name)))
    yield seen


def runs_as_made_so(units, seeds, slices=False):
    """Compares a module that came to a plan with one that was made with it, for some draws of all that may change.

    Returns:
        Collectives of both, and as they are predicted, and least peaks of live bytes.
    """
    plan, batches = base_plan(units, slices=slices), batches_by_step()
    came, found = Run(plan), []
    came.step(batches[0])
    with noted(came) as seen:
        for seed in seeds:
            target = _with_blocks(changed(plan, KINDS, seed), random.Random(seed), ["recompute"])
            change_plan(came.module, target)
            made = Run(target)
            for _ in range(2):  # the state of the optimizer comes with the first
                made.step(batches[0])
                came.step(batches[0])
            seen.clear()
            came.step(batches[1])
            ours = list(seen)
            with noted(made) as others:
                made.step(batches[1])
            expected = ours if slices else predicted(target)
            found.append(((ours, list(others), expected), (peak_bytes(came, batches), peak_bytes(made, batches))))
    return found


def predicted(plan):
    """Collectives of a step, by the schedule of ``fully_shard``."""
    blocks = ["pair", "alone"] if any(block.name == "pair" for block in plan.blocks) else BLOCKS
    module = module_of()
    profile = profile_model(module, batches_of(module, 0, 1)[0], blocks=blocks)
    step, modes = planned_step(plan, profile, stated_cluster(dist.get_world_size()))
    events = engine_of(plan).events_of(step, modes)
    kinds = {"gather": False, "reduce": True}
    return [(kinds[kind], step.units[of].name) for each in events for kind, of in each if kind in kinds]


def peak_bytes(run, batches):
    """The least peak of three steps: a thread of gloo may hold a tensor for longer."""
    found = []
    for given in batches[2:5]:
        with LiveBytes("cpu") as live:
            live.track(living_tensors(run.module, [run.optimizer]))
            live.track(tensor for batch in given for tensor in batch)
            run.step(given)
            found.append(live.peak_bytes)
    return min(found)


def refusals():
    """Errors, by what was wrong, and how a module trains on that was asked for all of it."""
    plan, rank = with_sync(base_plan("both"), "last"), dist.get_rank()
    other, found = changed(plan, ["modes", "blocks"], 1), {}
    runs, results = (Run(plan), Run(plan)), []
    asked, (first, second, third, *_) = runs[1], batches_by_step()
    module = asked.module

    def refused(name, to, of=module):
        found[name] = failure(lambda: change_plan(of, to))

    for run in runs:
        torch.manual_seed(5)
        run.step(first)
    root, *units = plan.units
    refused("another model", dataclasses.replace(plan, fingerprint={**plan.fingerprint, "gate": "another"}))
    refused("micro-batches", dataclasses.replace(plan, num_micro_batches=1))
    refused(
        "no block", dataclasses.replace(plan, blocks=(Block(name="nowhere", treatment=Treatment(saves="recompute")),))
    )
    refused("no mode", dataclasses.replace(plan, units=(root, units[0].treated(sync="node"), *units[1:])))
    refused("another on one rank", dataclasses.replace(other, notes=(f"rank {rank}",)))
    refused("nonsense on one rank", dataclasses.replace(other, world_size=9) if rank else other)
    refused("a part", other, of=module.pair)
    refused("a plain module", other, of=module_of())
    refused("no plan", other, of=ShardedModel.unplanned(module_of(), device=CPU).module)

    def step(run, *, asks):
        torch.manual_seed(7)
        for index, batch in enumerate(second):
            is_last = index == len(second) - 1
            with nullcontext() if is_last else run.model.accumulating():
                loss = run.module(batch) / len(second)
                if asks and index == 0:
                    refused("before backward", other)
                run.model.before_backward()
                loss.backward()
            if asks and not is_last:
                refused("gradients that are not reduced", other)
        run.model.before_optimizer_step(run.optimizer)
        run.optimizer.step()
        run.model.reshard()

    for run in runs:
        step(run, asks=run is asked)
        assert run.model.plan is plan
        results.append(run.found(run.step(third)))
    module.last.register_forward_pre_hook(lambda *_: refused("in forward", other))
    module.last.register_forward_hook(lambda _, __, output: _in_backward(output, lambda: refused("in backward", other)))
    asked.step(first)
    return found, apart(*results)


def in_windows(units, seed):
    """Trains a module whose plan changes between micro-batches, whose gradients wait, beside one that keeps its plan.

    Returns:
        Largest difference, and the last error where gradients would be reduced at another time.
    """
    plan = with_sync(base_plan(units), "last")
    expected, _ = trained(plan)
    run, losses, told, batches = Run(plan), [], None, batches_by_step()
    torch.manual_seed(7 + dist.get_rank())
    for step, given in enumerate(batches):
        for index, batch in enumerate(given):
            is_last = index == len(given) - 1
            with nullcontext() if is_last else run.model.accumulating():
                loss = run.module(batch) / len(given)
                run.model.before_backward()
                loss.backward()
            losses.append(loss.detach())
            if not is_last:
                told = failure(lambda: run.model.use(with_sync(plan, "every"), in_window=True))
                run.model.use(changed(plan, SAME_SUMS, repr((seed, step))), in_window=True)
        run.model.before_optimizer_step(run.optimizer)
        run.optimizer.step()
        run.model.reshard()
        run.optimizer.zero_grad()
    return apart(run.found(losses), expected), told


def _in_backward(output, call):
    output.register_hook(lambda _: call())


def forgets():
    """Changes where outputs are held by nobody, or backward was called for them, or needs not be; the last plan."""
    plan, (first, *_) = base_plan("both"), batches_by_step()
    run = Run(plan)
    plans = [changed(plan, KINDS, seed) for seed in range(4)]
    run.module(first[0])
    change_plan(run.module, plans[0])
    loss = run.module(first[0])
    loss.backward()
    change_plan(run.module, plans[1])
    run.optimizer.zero_grad()
    with torch.no_grad():
        held = run.module(first[0])
    change_plan(run.module, plans[2])
    with run.model.alone():
        held = [held, run.module(first[0])]
    change_plan(run.module, plans[3])
    return run.model.plan == plans[3], len(held), bool(loss)


# ---- by a Trainer


class Changing(L.Callback):
    """Changes the plan after each of some optimizer steps.

    Args:
        plans: by step.
    """

    def __init__(self, plans):
        self.plans = plans

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % MICRO_BATCHES == 0 and trainer.global_step in self.plans:
            change_plan(pl_module, self.plans[trainer.global_step])


def fitted(plan, folder, plans, *, max_epochs, ckpt_path=None, state_dict_type="full"):
    torch.manual_seed(5)
    module = module_of()
    fit = trainer(
        OSDPStrategy(plan=plan, state_dict_type=state_dict_type),
        plugins=[OSDPPrecision("64-true")],
        callbacks=[Changing(plans), ModelCheckpoint(folder, filename="{step}", save_on_train_epoch_end=True)],
        enable_checkpointing=True,
        max_steps=-1,
        max_epochs=max_epochs,
        accumulate_grad_batches=MICRO_BATCHES,
        limit_train_batches=4 * MICRO_BATCHES,
        default_root_dir=folder,
    )
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), ckpt_path=ckpt_path, weights_only=False)
    return fit, module


def weights_of(fit, module):
    """Whole parameters: running statistics are each rank's own, of which a checkpoint has rank 0's."""
    state = fit.strategy.whole_state_dict(on_all_ranks=True)
    buffers = {name for name, _ in module.named_buffers()}
    return {name: value for name, value in state.items() if name not in buffers}


def fits(state_dict_type):
    """A fit whose plan changes, saved and resumed under another one, beside a fit whose plan does not."""
    plan, folder = base_plan("both", slices=True), shared_folder()
    plans = [changed(plan, ["modes", "blocks", "prefetch"], seed) for seed in range(3)]
    expected, module = fitted(plan, shared_folder(), {}, max_epochs=2)
    state = weights_of(expected, module)
    first, ours = fitted(plan, folder, {1: plans[0], 2: plans[1]}, max_epochs=1, state_dict_type=state_dict_type)
    monitor = next(callback for callback in first.callbacks if isinstance(callback, PlanMonitor))
    is_followed = first.strategy.plan is plans[1] and monitor._plan is plans[1]
    path = first.checkpoint_callback.best_model_path
    second, resumed = fitted(path, folder, {5: plans[2]}, max_epochs=2, ckpt_path=path, state_dict_type=state_dict_type)
    return {
        "weights": apart(weights_of(second, resumed), state),
        "losses": [*ours.losses, *resumed.losses] == module.losses,
        "followed": is_followed,
        "resumed under": second.strategy.plan == plans[2],
    }


class Asking(L.Callback):
    """Changes to plans that the strategy's other options say something of, after the first step."""

    def __init__(self, plan):
        self.plan, self.told, self.done = plan, None, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 1 and self.told is None:
            self.told = failure(lambda: change_plan(pl_module, with_sync(self.plan, "last")))
            blocks = (
                Block(name="pair.before", treatment=Treatment(saves="offload")),
                Block(name="alone", treatment=Treatment(saves="offload")),
            )
            change_plan(pl_module, dataclasses.replace(self.plan, blocks=blocks))
            names = {module: name for name, module in pl_module.named_modules()}
            self.done = {names[forward.block]: forward.activations for forward in block_forwards(pl_module)}


def with_options():
    """The error where gradients are to add up in float32, and what blocks do where some recompute in any case."""
    module = Net()
    for name in BLOCKS:
        module.get_submodule(name).norm = nn.LayerNorm(6)  # in low precision batch statistics are a matter of their own
    world_size, modes = dist.get_world_size(), dict.fromkeys(UNITS["block"], "ZDP")
    plan = plan_of(module, modes, world_size=world_size, micro_batch_size=4, num_micro_batches=MICRO_BATCHES)
    asking = Asking(plan)
    strategy = OSDPStrategy(plan=plan, activation_checkpointing_policy={Pair}, accumulate_in_fp32=True)
    options = {"accumulate_grad_batches": MICRO_BATCHES, "max_steps": 3, "precision": "bf16-mixed"}
    fit = trainer(strategy, callbacks=[asking], **options)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    return asking.told, asking.done


SAME_SUMS = [kind for kind in KINDS if kind != "sync"]


@pytest.mark.parametrize(
    ("kinds", "options", "seeds"),
    [
        (SAME_SUMS, {"units": "block"}, [0]),
        *(slow([kind], {"units": "both", "sync": "last"}, [0, 1]) for kind in SAME_SUMS),
        slow(SAME_SUMS, {"units": "block"}, [1]),
        slow(SAME_SUMS, {"units": "both", "slices": True}, [0, 1]),
        slow(SAME_SUMS, {"units": "two blocks", "sync": "last"}, [0, 1]),
        slow(SAME_SUMS, {"units": "operators"}, [0, 1]),
    ],
)
def test_training_is_bit_equal_to_that_under_one_plan(ranks, kinds, options, seeds):
    for seed in seeds:
        found = ranks(2).run(differences, kinds=kinds, seed=seed, **options)
        for from_one_plan, from_ddp, are_names_kept in found:
            assert from_one_plan == 0.0
            assert from_ddp < 1e-12
            assert are_names_kept


@pytest.mark.parametrize(
    ("units", "seeds"), [("both", [0]), *(slow(units, range(2)) for units in ("block", "both", "operators"))]
)
def test_a_plan_changes_inside_a_step_where_gradients_are_reduced_as_before(ranks, units, seeds):
    for seed in seeds:
        for difference, (kind, text) in ranks(2).run(in_windows, units=units, seed=seed):
            assert difference == 0.0
            assert kind == "ConfigurationError"
            assert "holds gradients of 'first' that are not reduced yet" in text


@pytest.mark.slow
@pytest.mark.parametrize("units", ["block", "operators"])
def test_where_gradients_are_reduced_at_other_times_training_is_equal_within_rounding(ranks, units):
    given = {"seed": 0, "units": units}
    for kinds in (["sync"], list(KINDS)):
        for from_one_plan, from_ddp, are_names_kept in ranks(2).run(differences, kinds=kinds, **given):
            assert from_one_plan < 1e-12
            assert from_ddp < 1e-12
            assert are_names_kept


@pytest.mark.slow
@pytest.mark.parametrize("units", [slow("block"), slow("both"), "operators"])
def test_a_module_that_came_to_a_plan_runs_and_holds_what_one_does_that_was_made_with_it(ranks, units):
    for found in ranks(2).run(runs_as_made_so, units=units, seeds=range(4)):
        for (came, made, predicted), (came_bytes, made_bytes) in found:
            assert came == made
            assert Counter(came) == Counter(predicted)
            assert came_bytes == made_bytes
        assert len({tuple(came) for (came, _, _), _ in found}) > 1


BETWEEN = "Expected a plan to change between two optimizer steps, but rank 0 "
REFUSED = {
    "another model": ("PlanMismatchError", "but parameter 'gate' is '"),
    "micro-batches": ("PlanMismatchError", "but num_micro_batches is 2 in use and 1 in the plan"),
    "no block": ("PlanMismatchError", "but 'nowhere' is not there"),
    "no mode": (
        "PlanFormatError",
        "Expected the treatment of unit 'first' of the plan to be one that there is, got Treatment(",
    ),
    "another on one rank": ("PlanMismatchError", "Expected all ranks to change to the same plan, but that of rank 1"),
    "nonsense on one rank": ("PlanMismatchError", "but world_size is 2 in use and 9 in the plan"),
    "a part": ("ConfigurationError", "Expected a module that apply_plan, or a Trainer"),
    "a plain module": ("ConfigurationError", "Expected a module that apply_plan, or a Trainer"),
    "no plan": ("ConfigurationError", "Expected a module that was sharded by a plan, got one that was sharded without"),
    "before backward": ("ConfigurationError", f"{BETWEEN}has outputs of a forward that backward has not come to"),
    "gradients that are not reduced": ("ConfigurationError", f"{BETWEEN}holds gradients of 'first' that are not"),
    "in forward": ("ConfigurationError", f"{BETWEEN}is in forward of 'last'"),
    "in backward": ("ConfigurationError", f"{BETWEEN}is in backward of"),
}


def test_what_cannot_change_is_refused_on_all_ranks_and_training_goes_on(ranks):
    for told, difference in ranks(2).run(refusals):
        assert {name: kind for name, (kind, _) in told.items()} == {name: kind for name, (kind, _) in REFUSED.items()}
        assert {name: text for name, (_, text) in told.items() if REFUSED[name][1] not in text} == {}
        assert difference == 0.0


def test_a_plan_changes_whatever_was_run_before_if_no_backward_is_to_come(ranks):
    assert ranks(2).run(forgets) == [(True, 2, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_a_fit_trains_on_saves_and_resumes_as_if_its_plan_had_not_changed(ranks, state_dict_type):
    for found in ranks(2).run(fits, state_dict_type=state_dict_type):
        assert found == {"weights": 0.0, "losses": True, "followed": True, "resumed under": True}


def test_other_options_of_the_strategy_hold_under_every_plan(ranks):
    for (kind, text), blocks in ranks(2).run(with_options):
        assert kind == "ConfigurationError"
        assert text.startswith("Expected a plan with sync='every' for accumulate_in_fp32=True in bf16-mixed")
        assert blocks == {"pair": "recompute", "alone": "offload"}
