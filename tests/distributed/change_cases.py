"""Modules whose plan changes while they train, as the ranks run them, beside ones that keep theirs."""

import dataclasses
import itertools
import random
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

from activation_cases import BLOCKS, CPU, MODES, SLICES, UNITS, DroppingParts, Pair, batches_of
from cases import stated_cluster, trainer
from strategy_cases import failure, shared_folder
from wrapped_units import block_forwards

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPPrecision, OSDPStrategy, change_plan, profile_model
from lightning_osdp.apply import ShardedModel, internals
from lightning_osdp.callbacks.peak import living_tensors
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from lightning_osdp.core.modes import ACTIVATION_CHOICES
from lightning_osdp.core.plans.plan import Block
from lightning_osdp.engine import engine_of
from lightning_osdp.profiler import LiveBytes
from lightning_osdp.simulation import planned_step

MICRO_BATCHES = 2
STEPS = 7
NESTED = (["pair"], ["pair", "alone"], BLOCKS, BLOCKS[:1], [])
"""Blocks that do not keep what they save: none inside another at a time."""


class Net(DroppingParts):
    """Of which only `forward` is called, as apply_plan's users call it."""

    def forward(self, batch):
        return self.loss(batch)


def module_of():
    return Net().double()


def base_plan(units, *, slices=False):
    """A plan of `Net` with modes in turn."""
    chosen = dict(zip(UNITS[units], itertools.cycle(MODES["mixed"]), strict=False))
    if slices:
        chosen |= {name: SLICES[kind] for name in chosen if (kind := name.rpartition(".")[2]) in SLICES}
    return plan_of(
        module_of(), chosen, world_size=dist.get_world_size(), micro_batch_size=4, num_micro_batches=MICRO_BATCHES
    )


def _with_modes(plan, draw):
    units = [
        dataclasses.replace(unit, modes=tuple(draw.choice(["ZDP", "DP"]) for _ in unit.modes) if unit.name else ("DP",))
        for unit in plan.units
    ]
    return dataclasses.replace(plan, units=tuple(units))


def _with_sync(plan, draw):
    units = [
        dataclasses.replace(unit, sync=draw.choice(["every", "last"]) if unit.name else "every") for unit in plan.units
    ]
    return dataclasses.replace(plan, units=tuple(units))


def _with_blocks(plan, draw, choices=ACTIVATION_CHOICES[1:]):
    blocks = [Block(name=name, activations=draw.choice(choices)) for name in draw.choice(NESTED)]
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
    """Another plan, which differs in these."""
    draw = random.Random(seed)
    for kind in kinds:
        plan = KINDS[kind](plan, draw)
    return plan


class Run:
    """A module under a plan, its optimizer, and steps of it."""

    def __init__(self, plan):
        torch.manual_seed(3)
        self.module = module_of()
        self.model = ShardedModel.planned(self.module, plan, device=CPU)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)

    def step(self, batches):
        losses = []
        for index, batch in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else self.model.accumulating():
                loss = self.module(batch) / len(batches)
                self.model.before_backward()
                loss.backward()
            losses.append(loss.detach())
        self.model.before_optimizer_step(self.optimizer)
        self.optimizer.step()
        self.model.reshard()
        self.optimizer.zero_grad()
        return losses

    def names(self):
        """What anyone might know something by."""
        optimizer = self.model.optimizer_state(self.optimizer, "sharded")
        return {
            "parameters": [name for name, _ in self.module.named_parameters()],
            "modules": [name for name, _ in self.module.named_modules()],
            "buffers": [name for name, _ in self.module.named_buffers()],
            "state": list(self.model.model_state("sharded")),
            "whole state": list(self.model.whole_state(on_all_ranks=True)),
            "optimizer": sorted(optimizer["state"]) if optimizer["state"] else [],
        }

    def found(self, losses):
        """What it has come to."""
        state = self.model.whole_state(on_all_ranks=True)
        return {"losses": torch.stack(losses), "random": torch.rand(3), **state}


def batches_by_step():
    batches = batches_of(module_of(), dist.get_rank(), STEPS * MICRO_BATCHES)
    return [batches[i : i + MICRO_BATCHES] for i in range(0, len(batches), MICRO_BATCHES)]


def trained(plan, changes=()):
    """What training comes to, and the names under each plan.

    Args:
        plan: to begin with.
        changes: plans to change to after each step.
    """
    run, losses, names = Run(plan), [], []
    batches = batches_by_step()
    torch.manual_seed(7 + dist.get_rank())
    for step, (given, following) in enumerate(itertools.zip_longest(batches, changes)):
        losses += run.step(given)
        if step:
            with torch.random.fork_rng():
                names.append(run.names())
        if following is not None:
            change_plan(run.module, following)
            assert run.model.plan is following
    return run.found(losses), names


def ddp():
    """The same under DDP."""
    torch.manual_seed(3)
    module = DistributedDataParallel(module_of(), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batches, losses = batches_by_step(), []
    torch.manual_seed(7 + dist.get_rank())
    for given in batches:
        for index, batch in enumerate(given):
            with nullcontext() if index == len(given) - 1 else module.no_sync():
                loss = module(batch) / len(given)
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), "random": torch.rand(3), **module.module.state_dict()}


def apart(one, other):
    assert set(one) == set(other), (list(one), list(other))
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def differences(kinds, seed, *, units, slices=False, sync="every"):
    """Of a module whose plan changes after each step, there and back: from one that keeps its plan, and from DDP.

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
    groups = [(internals.group_of(unit.handle), unit.name) for unit in run.model.units]
    for group, name in groups:
        if group is not None:
            internals.on_collectives(group, lambda is_reduction, name=name: seen.append((is_reduction, name)))
    yield seen


def runs_as_made_so(units, seeds, slices=False):
    """What a module does that came to a plan, beside one that was made with it, for some draws of all that may change.

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


# ---- what is refused


def with_sync(plan, sync):
    units = tuple(dataclasses.replace(unit, sync=sync if unit.name else "every") for unit in plan.units)
    return dataclasses.replace(plan, units=units)


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
    refused("no block", dataclasses.replace(plan, blocks=(Block(name="nowhere", activations="recompute"),)))
    refused("no mode", dataclasses.replace(plan, units=(root, dataclasses.replace(units[0], modes=("X",)), *units[1:])))
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
            blocks = (Block(name="pair.before", activations="offload"), Block(name="alone", activations="offload"))
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
