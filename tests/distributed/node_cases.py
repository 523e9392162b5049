"""Plans for several nodes, on ranks that take themselves for nodes, as the ranks run them."""

import dataclasses
import itertools
import random
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).parent))

import change_cases
from cases import (
    largest_difference,
    plan_for,
    profile_of,
    reference,
    stated_cluster,
    trained,
    trainer,
)
from models import build
from strategy_cases import failure

from lightning_osdp import OSDPStrategy, SearchSpace, measure_cluster, simulate
from lightning_osdp.callbacks import PlanMonitor

NODE_SIZE = 2
NUM_BATCHES = 10
"""Of an epoch, on four ranks: as many micro-batches as there may be in all steps."""
MODES = {"hpz": ["hpZ"], "mixed": ["hpZ", "DP", "ZDP"]}


def cluster_of_nodes():
    return dataclasses.replace(stated_cluster(dist.get_world_size()), node_size=NODE_SIZE)


def in_nodes(plan, modes, sync="every"):
    """The plan with these modes in turn, and with gradients reduced in these micro-batches."""
    units = [
        dataclasses.replace(unit, modes=(mode,), sync=sync) if unit.name else unit
        for unit, mode in zip(plan.units, itertools.cycle(MODES[modes]), strict=False)
    ]
    return dataclasses.replace(plan, units=tuple(units), node_size=NODE_SIZE)


def equivalence(name, optimizer, dtype, num_micro_batches=1, clip=None, sync="every", rehearse=False):
    """By modes: differences of weights after five steps from DDP's and from one process's (rank 0)."""
    world_size, found = dist.get_world_size(), {}
    options = {"accumulate_grad_batches": num_micro_batches, "gradient_clip_val": clip}
    ddp, _, _ = trained(DDPStrategy(process_group_backend="gloo"), name, optimizer, dtype, **options)
    start = build(name, optimizer, dtype)
    if dist.get_rank() == 0:
        plain = reference(name, optimizer, dtype, world_size=world_size, num_micro_batches=num_micro_batches, clip=clip)
    for modes in MODES:
        base = plan_for(start, "zdp", world_size=world_size, num_micro_batches=num_micro_batches)
        strategy = OSDPStrategy(plan=in_nodes(base, modes, sync), node_size=NODE_SIZE, rehearse=rehearse)
        weights, _, _ = trained(strategy, name, optimizer, dtype, **options)
        if dist.get_rank() == 0:
            found[modes] = (largest_difference(weights, ddp), largest_difference(weights, plain))
    return found


def peaks(name, modes, num_micro_batches, prefetch, asynchronous):
    """Bytes that a step was predicted to take, and was counted to take."""
    world_size, space = dist.get_world_size(), SearchSpace(min_unit_bytes=1024, share_units=False)
    module = build(name, "adamw")
    plan = plan_for(module, "zdp", world_size=world_size, num_micro_batches=num_micro_batches, space=space)
    plan = dataclasses.replace(in_nodes(plan, modes), backward_prefetch=prefetch, asynchronous_unshard=asynchronous)
    predicted = simulate(plan, profile_of(module), cluster_of_nodes()).peak
    fit = trainer(OSDPStrategy(plan=plan, node_size=NODE_SIZE), accumulate_grad_batches=num_micro_batches)
    module = build(name, "adamw")
    fit.fit(module, module.loader(dist.get_rank(), world_size))
    check = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
    return predicted.peak_bytes, check.measured.peak_bytes


def changes(seed):
    """Of a module whose units are freed, kept or left in nodes in turn: from one that keeps its plan, and from DDP."""
    draw = random.Random(seed)

    def drawn(plan):
        units = [
            dataclasses.replace(unit, modes=tuple(draw.choice(["ZDP", "hpZ", "DP"]) for _ in unit.modes))
            if unit.name
            else unit
            for unit in plan.units
        ]
        return dataclasses.replace(plan, units=tuple(units))

    plan = dataclasses.replace(change_cases.base_plan("both"), node_size=NODE_SIZE)
    with mock.patch.object(change_cases, "STEPS", NUM_BATCHES // change_cases.MICRO_BATCHES):
        plans = [drawn(plan) for _ in range(change_cases.STEPS - 1)]
        expected, _ = change_cases.trained(plan)
        found, _ = change_cases.trained(plan, plans)
        return change_cases.apart(found, expected), change_cases.apart(found, change_cases.ddp())


def left_after_evaluation():
    """Bytes that units hold beyond their shards after an evaluation, and once they are resharded; those predicted."""
    module = change_cases.module_of()
    plan = dataclasses.replace(change_cases.base_plan("operators"), node_size=NODE_SIZE)
    units = [dataclasses.replace(unit, modes=("hpZ",)) if unit.name else unit for unit in plan.units]
    run = change_cases.Run(dataclasses.replace(plan, units=tuple(units)))
    batch = change_cases.batches_of(module, dist.get_rank(), 1)[0]

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
    from lightning_osdp.apply import internals

    return internals.group_of(unit.handle)


def measured():
    return measure_cluster(torch.device("cpu"), local_ranks=dist.get_world_size(), node_size=NODE_SIZE)


def refused(node_size, planned_for=NODE_SIZE):
    """The error of a fit with a plan for nodes of other sizes, or ranks that nodes of this size cannot have."""
    module = build("wide_mlp", "sgd")
    plan = plan_for(module, "zdp", world_size=dist.get_world_size())
    plan = dataclasses.replace(in_nodes(plan, "hpz"), node_size=planned_for)
    fit = trainer(OSDPStrategy(plan=plan, node_size=node_size))
    return failure(lambda: fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size())))
