"""Four ranks as two nodes of two: training is training in all modes, takes what is predicted, and may change modes."""

import dataclasses
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy, SearchSpace, change_plan, measure_cluster, simulate
from lightning_osdp.apply import ShardedModel, local
from lightning_osdp.apply.ranks import agreement
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from lightning_osdp.profiler import untouched
from tests.distributed.support import parts
from tests.distributed.support.fits import (
    MODES_OF_NODES,
    NODE_SIZE,
    failure,
    in_nodes,
    largest_difference,
    plan_for,
    profile_of,
    reference,
    stated_cluster,
    staying,
    trained,
    trainer,
)
from tests.distributed.support.models import GPT, MODELS, build
from tests.support.tiers import but_slow, slow

pytestmark = pytest.mark.distributed


CPU = torch.device("cpu")
NUM_BATCHES = 10
"""Micro-batches of an epoch on four ranks: as many as there may be in all steps."""


class HalfFrozen(GPT):
    """GPT with units that are frozen, or in part."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.tokens.requires_grad_(False)
        self.blocks[0].fc.weight.requires_grad_(False)
        self.blocks[1].out.bias.requires_grad_(False)


MODELS |= {"half_frozen": HalfFrozen}


def cluster_of_nodes():
    return dataclasses.replace(stated_cluster(dist.get_world_size()), node_size=NODE_SIZE)


def equivalence(
    name,
    optimizer,
    dtype,
    num_micro_batches=1,
    clip=None,
    sync="every",
    dry_run=False,
    sliced=(),
    all_modes=tuple(MODES_OF_NODES),
    steps=5,
):
    """Returns, by modes, how far weights are after so many steps from DDP and one process, and nodes apart (rank 0)."""
    world_size, found = dist.get_world_size(), {}
    options = {"accumulate_grad_batches": num_micro_batches, "gradient_clip_val": clip, "max_steps": steps}
    ddp, _, _ = trained(DDPStrategy(process_group_backend="gloo"), name, optimizer, dtype, **options)
    start = build(name, optimizer, dtype)
    if dist.get_rank() == 0:
        given = {"world_size": world_size, "steps": steps, "num_micro_batches": num_micro_batches, "clip": clip}
        plain = reference(name, optimizer, dtype, **given)
    for modes in all_modes:
        base = plan_for(start, "zdp", world_size=world_size, num_micro_batches=num_micro_batches)
        strategy = OSDPStrategy(plan=in_nodes(base, modes, sync, sliced), node_size=NODE_SIZE, dry_run=dry_run)
        weights, _, fit = trained(strategy, name, optimizer, dtype, **options)
        apart = nodes_apart(fit.lightning_module)
        if dist.get_rank() == 0:
            found[modes] = (largest_difference(weights, ddp), largest_difference(weights, plain), apart)
    return found


def nodes_apart(module):
    """Largest difference between what two nodes hold of a parameter, over all ranks; zero where no node holds one."""
    found = []
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim == 2:
            rows = local(parameter.detach()).contiguous()
            others = [torch.empty_like(rows) for _ in range(parameter.device_mesh.size(0))]
            dist.all_gather(others, rows, group=parameter.device_mesh.get_group(0))
            found += [float((rows - other).abs().max()) for other in others if rows.numel()]
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, max(found, default=0.0))
    return max(told)


def low_precision(name, optimizer):
    """Losses in bf16-mixed under a plan that shards all units over all ranks, and by modes."""
    module, found = build(name, optimizer), {}
    for modes in ("zdp", *MODES_OF_NODES):
        plan = plan_for(module, "zdp", world_size=dist.get_world_size())
        plan = plan if modes == "zdp" else in_nodes(plan, modes)
        strategy = OSDPStrategy(plan=plan, node_size=plan.node_size)
        _, found[modes], fit = trained(strategy, name, optimizer, "float32", precision="bf16-mixed")
        assert nodes_apart(fit.lightning_module) == 0.0
    return found


class Noisy(GPT):
    """Adds noise to its gradients."""

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=1e-3)


class NoisyLater(Noisy):
    """Adds noise from the third step on."""

    def on_after_backward(self):
        if self.trainer.global_step >= 2:
            super().on_after_backward()


class Reinitialized(GPT):
    """Draws its weights when it has been sharded."""

    def on_fit_start(self):
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.02)


MODELS |= {"noisy": Noisy, "noisy later": NoisyLater, "reinitialized": Reinitialized}


def draws(name, modes, is_alike):
    """Fits with shards for which each rank draws numbers; returns the error, the steps, and how far apart nodes end.

    Args:
        name: name of a model that draws numbers.
        modes: one of `MODES_OF_NODES`.
        is_alike: True where ranks draw the same numbers.
    """
    plan = in_nodes(plan_for(build("gpt"), "zdp", world_size=dist.get_world_size()), modes)
    module = build(name)
    torch.manual_seed(0 if is_alike else dist.get_rank())
    fit = trainer(OSDPStrategy(plan=plan, node_size=NODE_SIZE))
    with mock.patch.object(agreement, "_STEPS_BETWEEN", 3):
        told = failure(lambda: fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size())))
    return told, fit.global_step, nodes_apart(module)


def evaluates_in_inference_mode(modes, num_fits):
    """Validation losses before and after each of so many fits, in the caller's inference mode and not; under DDP."""
    found, plan = [], in_nodes(plan_for(build("gpt"), "zdp", world_size=dist.get_world_size()), modes)
    for is_ours in (True, False):
        module, losses = build("gpt"), []
        data, loader = DataLoader(module.dataset(), batch_size=8), module.loader(dist.get_rank(), dist.get_world_size())
        for fits_before in range(1 + num_fits):
            ours, ddp = OSDPStrategy(plan=plan, node_size=NODE_SIZE), DDPStrategy(process_group_backend="gloo")
            fit = trainer(ours if is_ours else ddp, limit_val_batches=2)
            if fits_before:
                fit.fit(module, loader)
            for is_inference in (True, False):
                with torch.inference_mode(is_inference):
                    losses.append(fit.validate(module, data, verbose=False)[0]["val_loss"])
        found.append(losses)
    return found


def plan_in_nodes(modes, units="operators"):
    """Plans units in nodes for the module that `parts` trains."""
    plan = parts.base_plan(units)
    whole = [unit.in_modes("ZDP") for unit in plan.units]
    return in_nodes(dataclasses.replace(plan, units=tuple(whole)), modes)


def begins_unlike(is_synchronized, all_modes):
    """Returns how far nodes are apart, and from the values that count, where each rank begins with its own."""
    found, rank = {}, dist.get_rank()
    for modes in all_modes:
        plan = in_nodes(plan_for(build("gpt"), "zdp", world_size=dist.get_world_size()), modes)
        module = build("gpt")
        own = {name: value + rank for name, value in module.state_dict().items()}
        module.load_state_dict(own)
        model = ShardedModel.planned(module, plan, device=CPU, sync_module_states=is_synchronized)
        whole = model.whole_state(on_all_ranks=True)
        told = [own if is_synchronized else whole]
        dist.broadcast_object_list(told)
        found[modes] = nodes_apart(module), largest_difference(whole, told[0])
    return found


few_steps = mock.patch.object(parts, "STEPS", NUM_BATCHES // parts.MICRO_BATCHES)


def batches():
    """Returns batches of each of a few steps."""
    with few_steps:
        return parts.batches_by_step()


def writes_back(modes):
    """Returns how far weights are from what all ranks wrote while weights were whole, and how far nodes are apart."""
    run = parts.Run(plan_in_nodes(modes))
    run.step(batches()[0])
    with run.model.gathered(run.module, writes=True), torch.no_grad():
        for parameter in run.module.parameters():
            parameter.mul_(2).add_(torch.arange(parameter.numel()).view_as(parameter))
        written = {name: parameter.clone() for name, parameter in run.module.named_parameters()}
    whole = run.model.whole_state(on_all_ranks=True)
    apart = max(float((whole[name] - value).abs().max()) for name, value in written.items())
    return apart, nodes_apart(run.module)


def refused_moves():
    """Returns errors of plans under which units would be sharded over other ranks, and how training goes on."""
    plans = {modes: plan_in_nodes(modes) for modes in MODES_OF_NODES}
    found = {}
    for of, to in (("hpz", "hsdp"), ("hdp", "hpz"), ("all", "hsdp")):
        run, same = parts.Run(plans[of]), parts.Run(plans[of])
        given = batches()
        for each in (run, same):
            torch.manual_seed(7)
            each.step(given[0])
        told = failure(lambda run=run, to=to: change_plan(run.module, plans[to]))
        results = []
        for each in (run, same):
            torch.manual_seed(7)
            results.append(each.found(each.step(given[1])))
        found[of, to] = told, parts.apart(*results)
    return found


def refused_inside_a_step():
    """Returns the error of a change of the plan while gradients are reduced in nodes alone, and if it goes after."""
    plan = plan_in_nodes("hsdp")
    root, *units = plan.units
    units = [root, *(unit.treated(sync="node") for unit in units)]
    waiting = dataclasses.replace(plan, units=tuple(units))
    run, (first, *_) = parts.Run(waiting), batches()
    with run.model.accumulating():
        run.module(first[0]).backward()
    told = failure(lambda: change_plan(run.module, plan))
    run.module(first[1]).backward()
    change_plan(run.module, plan)
    return told, run.model.plan is plan


def runs_alone(modes):
    """Steps of each rank alone, as many as no other one takes; how training goes on, and what is left of them."""
    plan, results = plan_in_nodes(modes, "both"), []
    plan = parts.with_sync(plan, "last")
    first, second, *_ = batches()
    for is_alone in (True, False):
        run = parts.Run(plan)
        torch.manual_seed(7)
        run.step(first)
        if is_alone:
            with run.model.alone(), untouched(run.module, left_out=run.model.shards):
                run.model.shard_gradients()
                for batch in second * (dist.get_rank() + 1):
                    run.module(batch).backward()
                with run.model.accumulating():
                    run.module(second[0]).backward()
            groups = [group for unit in run.model.units for group in [unit_group(unit)] if group is not None]
            assert all(group._partial_reduce_output is None for group in groups)
            assert all(group._all_reduce_state is None for group in groups)
        results.append(run.found(run.step(second)))
    return parts.apart(*results)


def peaks(name, modes, num_micro_batches, prefetch, asynchronous, sync):
    """Bytes that a step was predicted to take, and was counted to take."""
    world_size, space = dist.get_world_size(), SearchSpace(min_unit_bytes=1024, share_units=False)
    module = build(name, "adamw")
    plan = plan_for(module, "zdp", world_size=world_size, num_micro_batches=num_micro_batches, space=space)
    plan = dataclasses.replace(
        in_nodes(plan, modes, sync), backward_prefetch=prefetch, asynchronous_unshard=asynchronous
    )
    predicted = simulate(plan, profile_of(module), cluster_of_nodes()).peak
    fit = trainer(OSDPStrategy(plan=plan, node_size=NODE_SIZE), accumulate_grad_batches=num_micro_batches)
    module = build(name, "adamw")
    fit.fit(module, module.loader(dist.get_rank(), world_size))
    check = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
    return predicted.peak_bytes, check.measured.peak_bytes


def changes(seed, modes):
    """Returns differences of a module whose units change modes in turn: from one that keeps its plan, and from DDP."""
    draw = random.Random(seed)

    def drawn(plan):
        units = [
            unit.in_modes(*tuple(draw.choice(staying(mode)) for mode in unit.modes)) if unit.name else unit
            for unit in plan.units
        ]
        return dataclasses.replace(plan, units=tuple(units))

    plan = plan_in_nodes(modes, "both")
    with few_steps:
        plans = [drawn(plan) for _ in range(parts.STEPS - 1)]
        expected, _ = parts.trained(plan)
        found, _ = parts.trained(plan, plans)
        return parts.apart(found, expected), parts.apart(found, parts.ddp())


def left_after_evaluation():
    """Bytes that units hold beyond their shards after an evaluation, and once they are resharded; those predicted."""
    module = parts.module_of()
    plan = dataclasses.replace(parts.base_plan("operators"), node_size=NODE_SIZE)
    units = [unit.in_modes("hpZ") if unit.name else unit for unit in plan.units]
    run = parts.Run(dataclasses.replace(plan, units=tuple(units)))
    batch = parts.batches_of(module, dist.get_rank(), 1)[0]

    def held():
        groups = [group for unit in run.model.units if unit.name for group in [unit_group(unit)] if group is not None]
        parameters = [parameter for group in groups for parameter in group.fsdp_params]
        data = [getattr(parameter, "_sharded_post_forward_param_data", None) for parameter in parameters]
        whole = [parameter.all_gather_outputs[0] for parameter in parameters if parameter.all_gather_outputs]
        return (
            sum(each.nbytes for each in data if each is not None),
            sum(each.untyped_storage().nbytes() for each in whole),
            sum(each.numel() * each.itemsize for each in whole),
        )

    with torch.no_grad():
        before = run.module(batch)
    left, whole, gathered = held()
    run.model.reshard()
    return left, whole, gathered, held()[:2], float(before)


def unit_group(unit):
    from lightning_osdp.apply.internals import access

    return access.group_of(unit.handle)


def measured():
    return measure_cluster(torch.device("cpu"), local_ranks=dist.get_world_size(), node_size=NODE_SIZE)


def refused(node_size, planned_for=NODE_SIZE):
    """The error of a fit with a plan for nodes of other sizes, or ranks that nodes of this size cannot have."""
    module = build("wide_mlp", "sgd")
    plan = plan_for(module, "zdp", world_size=dist.get_world_size())
    plan = dataclasses.replace(in_nodes(plan, "hpz"), node_size=planned_for)
    fit = trainer(OSDPStrategy(plan=plan, node_size=node_size))
    return failure(lambda: fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size())))


TIED = {"name": "tied_gpt", "optimizer": "adamw", "dtype": "float64", "num_micro_batches": 2}


@pytest.mark.parametrize(
    "options",
    [
        slow({"name": "gpt", "optimizer": "adamw", "dtype": "float64"}),
        slow({"name": "odd_mlp", "optimizer": "sgd", "dtype": "float64", "clip": 0.05}),
        slow({**TIED, "sync": "last"}),
        slow({"name": "gpt", "optimizer": "adamw", "dtype": "float64", "num_micro_batches": 2, "dry_run": True}),
        slow({"name": "half_frozen", "optimizer": "sgd", "dtype": "float64", "num_micro_batches": 2, "sync": "last"}),
        {**TIED, "sync": "node", "all_modes": ("all",), "steps": 3},
        slow({**TIED, "sync": "node", "all_modes": ("hsdp",)}),
        slow({**TIED, "sync": "node", "all_modes": ("hpz", "mixed", "hdp")}),
        slow({"name": "gpt", "optimizer": "adamw", "dtype": "float64", "clip": 0.05, "sliced": ("fc", "out", "head")}),
    ],
    ids=[
        "adamw",
        "clipped sgd",
        "tied, last",
        "dry run",
        "frozen, last",
        "tied, node",
        "hsdp",
        "tied, other modes",
        "sliced",
    ],
)
def test_steps_equal_ddp_and_one_process(ranks, options):
    found = ranks(4).run(equivalence, **options)[0]
    assert set(found) == set(options.get("all_modes", MODES_OF_NODES))
    for from_ddp, from_one, nodes_apart in found.values():
        assert from_ddp < 1e-7
        assert from_one < 1e-7
        assert nodes_apart == 0.0


@pytest.mark.slow
def test_in_low_precision_units_in_nodes_train_like_those_over_all_ranks(ranks):
    found = ranks(4).run(low_precision, name="gpt", optimizer="adamw")[0]
    expected = found.pop("zdp")
    assert set(found) == set(MODES_OF_NODES)
    assert expected[-1] < expected[0]
    for losses in found.values():
        assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("all_modes", [("hdp", "all"), slow(("hpz", "mixed", "hsdp"))])
@pytest.mark.parametrize("is_synchronized", [False, True])
def test_nodes_begin_with_the_same_values_though_ranks_have_made_others(ranks, is_synchronized, all_modes):
    for found in ranks(4).run(begins_unlike, is_synchronized=is_synchronized, all_modes=all_modes):
        assert set(found) == set(all_modes)
        assert all(apart == (0.0, 0.0) for apart in found.values()), found


@pytest.mark.parametrize(
    ("model", "modes", "name", "after"),
    [
        slow("noisy", "hsdp", "tokens.weight", 1),
        ("noisy later", "hsdp", "tokens.weight", 3),
        slow("noisy", "all", "positions", 1),
    ],
)
def test_nodes_that_drift_apart_are_told_which_weights_do(ranks, model, modes, name, after):
    found = ranks(4).run(draws, name=model, modes=modes, is_alike=False)
    for told, num_steps, _ in found:
        assert told is not None, found
        kind, text = told
        assert kind == "RanksApartError"
        assert f"Expected every node to have the same values of each parameter, but those of {name!r} differ" in text
        assert num_steps == after


@pytest.mark.parametrize(("modes", "is_alike"), [slow("hdp", True), slow("hpz", False)])
def test_ranks_may_draw_numbers_that_are_alike_and_any_where_no_node_has_all_of_a_unit(ranks, modes, is_alike):
    assert ranks(4).run(draws, name="noisy", modes=modes, is_alike=is_alike) == [(None, 5, 0.0)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("modes", ["hdp", "all"])
def test_nodes_begin_to_train_alike_though_ranks_have_drawn_other_weights(ranks, modes):
    assert ranks(4).run(draws, name="reinitialized", modes=modes, is_alike=False) == [(None, 5, 0.0)] * 4


@pytest.mark.parametrize(("modes", "num_fits"), [slow("hpz", 1), slow("all", 2)])
def test_evaluation_in_inference_mode_is_evaluation(ranks, modes, num_fits):
    for found, expected in ranks(4).run(evaluates_in_inference_mode, modes=modes, num_fits=num_fits):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("modes", [slow("mixed"), slow("hdp"), "all"])
def test_steps_that_ranks_take_alone_reach_no_other_and_leave_nothing(ranks, modes):
    assert ranks(4).run(runs_alone, modes=modes) == [0.0] * 4


@pytest.mark.parametrize("modes", ["hsdp", slow("all")])
def test_what_is_written_to_whole_parameters_stays_in_each_node(ranks, modes):
    assert ranks(4).run(writes_back, modes=modes) == [(0.0, 0.0)] * 4


@pytest.mark.parametrize(
    ("num_micro_batches", "prefetch", "sync"),
    [slow(1, "pre", "every"), slow(2, "none", "every"), (2, "pre", "node")],
)
@pytest.mark.parametrize("asynchronous", [True, slow(False)])
@pytest.mark.parametrize("modes", but_slow(MODES_OF_NODES, slow=MODES_OF_NODES.keys() - {"all"}))
def test_peak_of_a_step_is_what_was_predicted(ranks, modes, num_micro_batches, prefetch, sync, asynchronous):
    predicted, counted = ranks(4).run(
        peaks,
        name="wide_mlp",
        modes=modes,
        num_micro_batches=num_micro_batches,
        prefetch=prefetch,
        asynchronous=asynchronous,
        sync=sync,
    )[0]
    assert predicted == pytest.approx(counted, rel=2e-3)


@pytest.mark.parametrize("modes", [slow("mixed"), "all"])
def test_units_change_between_being_freed_kept_and_left_in_nodes_while_they_train(ranks, modes):
    for from_one_plan, from_ddp in ranks(4).run(changes, seed=3, modes=modes):
        assert from_one_plan == 0.0
        assert from_ddp < 1e-12


@pytest.mark.slow
def test_a_plan_that_shards_a_unit_over_other_ranks_is_refused_while_training_goes_on(ranks):
    for found in ranks(4).run(refused_moves):
        assert [apart for _, apart in found.values()] == [0.0] * 3
        assert {kind for (kind, _), _ in found.values()} == {"PlanMismatchError"}
        texts = [text for (_, text), _ in found.values()]
        assert "'home' of unit 'first' is ('all',) in use and ('node',) in the plan" in texts[0]
        assert "'home' of unit '' is ('node',) in use and ('all',) in the plan" in texts[1]


def test_a_change_waits_for_gradients_that_are_reduced_inside_of_nodes_alone(ranks):
    for (kind, text), is_changed in ranks(4).run(refused_inside_a_step):
        assert kind == "ConfigurationError"
        assert "holds gradients of 'first' that are not reduced yet" in text
        assert is_changed


def test_an_evaluation_leaves_a_shard_in_each_node_until_weights_change(ranks):
    for left, whole, gathered, resharded, _ in ranks(4).run(left_after_evaluation):
        assert left == gathered / NODE_SIZE > 0
        assert whole == 0
        assert resharded == (0, 0)


@pytest.mark.slow
def test_links_inside_of_nodes_and_between_them_are_measured(ranks):
    first, *others = ranks(4).run(measured)
    assert others == [first] * 3
    assert (first.world_size, first.node_size, first.has_nodes) == (4, 2, True)
    links = [getattr(each, name) for each in (first.within_node, first.between_nodes) for name in vars(each)]
    for link in (*links, first.all_reduce):
        assert link.ring_s(2**20, 2) > 0


@pytest.mark.parametrize(
    ("node_size", "message"),
    [
        (3, "Expected a node_size that divides the 4 ranks, got 3"),
        (4, "the plan is for nodes of 2 ranks, this run has nodes of 4"),
        (None, "the plan is for nodes of 2 ranks, this run has nodes of 4"),
    ],
)
def test_a_plan_for_other_nodes_is_refused(ranks, node_size, message):
    for kind, text in ranks(4).run(refused, node_size=node_size):
        assert kind in {"ConfigurationError", "PlanMismatchError"}
        assert message in text
