"""Trainers on a pool's ranks, plans for this folder's models, and what tests compare of their fits."""

import dataclasses
import itertools
import tempfile
from functools import partial
from pathlib import Path
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from lightning_osdp import (
    Cluster,
    DeviceRates,
    OSDPPrecision,
    OSDPStrategy,
    PlanMethod,
    SearchSpace,
    make_plan,
    profile_model,
)
from lightning_osdp.core.axes import STATIONARY
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Link
from lightning_osdp.errors import OSDPError, UntraceableError
from lightning_osdp.profiler import ComputePrecision, TrainingStep
from lightning_osdp.profiler.machine import links, overlap, unit_overhead
from lightning_osdp.strategy.planning import plan_fit, profile_fit
from tests.distributed.support.models import BATCH_SIZE, build

WEIGHTS = SearchSpace().offered_modes
"""Modes that are offered by default, named: where links seem slow, activations move unasked else."""
WITHOUT_LEVELS = ("keep", "recompute")
"""Choices of blocks for tests that are not about these: levels take as long to profile as all else."""
EVERYTHING = SearchSpace(modes=WEIGHTS, min_unit_bytes=0, share_units=False, activations=WITHOUT_LEVELS)


def stated_cluster(world_size):
    """Ranks whose links and memory are as stated here."""
    link = Link(latency_s=1e-5, seconds_per_byte=1e-9)
    return Cluster(world_size=world_size, all_gather=link, reduce_scatter=link, memory_bytes=2**34)


def _stated(*_, **__):
    return stated_cluster(dist.get_world_size())


STATED_RATES = DeviceRates(flops_per_s={"float32": 1e10, "float64": 1e10}, bytes_per_s=1e10)

without_measuring = mock.patch.object(plan_fit, "measure_cluster", new=_stated)
"""Patch for cases that plan but are not about links: measuring takes longer than the rest, on four ranks seconds."""
with_stated_seconds = mock.patch.object(profile_fit, "profile_model", new=partial(profile_model, rates=STATED_RATES))
"""Patch for cases whose plans have to be the same on every machine: nothing is timed."""


def measuring_briefly(case):
    """Has a case measure links by few sizes and runs: ranks that share a core take long, and no test asks for more."""
    few = mock.patch.multiple(links, _SIZES_BYTES=links._SIZES_BYTES[:5], _MOST_IN_A_ROW=3)
    once = mock.patch.multiple(overlap, _OVERLAP_REPEATS=1, _LEAST_REPEATS=1)
    return few(once(mock.patch.multiple(unit_overhead, _REPEATS=4, _PATIENCE_S=0.0)(case)))


PROFILED = {"exchanges": True, "activations": ("keep",)}
_profiles = {}


def profile_of(module):
    """Profiles one of this folder's models, once and by rank 0: its class, optimizer and dtype say all of it.

    Times are stated, so that plans are the same on every machine and however busy it is.
    """
    key = type(module), module.optimizer_name, next(module.parameters()).dtype
    if key not in _profiles:
        found = [_profiled(module) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        _profiles[key] = found[0]
    return _profiles[key]


def _profiled(module):
    batch = next(iter(module.loader(0, 1)))
    try:
        profile = profile_model(module, batch, rates=STATED_RATES, **PROFILED)
    except UntraceableError:  # it reads values, so it is timed
        profile = profile_model(module, batch, **PROFILED)
    return dataclasses.replace(profile, optimizer=dataclasses.replace(profile.optimizer, s_per_element=1e-9))


def plan_for(module, modes, *, world_size, micro_batch_size=BATCH_SIZE, num_micro_batches=1, space=EVERYTHING):
    """A plan of this module with "zdp", "dp" or "mixed" modes: every other unit DP."""
    plan = make_plan(
        profile_of(module),
        stated_cluster(world_size),
        memory_limit_bytes=2**40,
        micro_batch_size=BatchPolicy.fixed(micro_batch_size, num_micro_batches),
        method=PlanMethod(search="greedy"),
        search_space=space,
    )
    chosen = {"zdp": ["ZDP"], "dp": ["DP"], "mixed": ["DP", "ZDP"]}[modes]
    units = [
        unit if unit.name == "" else unit.in_modes(chosen[index % len(chosen)]) for index, unit in enumerate(plan.units)
    ]
    return dataclasses.replace(plan, units=tuple(units))


def profiled_in(precision, module):
    """Profile of a module in a precision, by stated rates."""
    dtype = torch.bfloat16 if precision == "bf16-mixed" else None

    def run(batch):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return module.training_step(batch, 0)

    rates = dataclasses.replace(STATED_RATES, flops_per_s={**STATED_RATES.flops_per_s, "bfloat16": 1e10})
    step = TrainingStep(run, None, ComputePrecision(dtype, (nn.BatchNorm1d,), dtype))
    return profile_model(module, next(iter(module.loader(0, 1))), step, rates=rates, **PROFILED)


def hosted(plan, number=2, shard="device"):
    """The plan with states of every so many-th unit on the host, of those in which something is trained, and shards."""
    units = [
        unit.treated(states="host", shard=shard) if index % number == 0 and unit.gradient_bytes != 0 else unit
        for index, unit in enumerate(plan.units)
    ]
    return dataclasses.replace(plan, units=tuple(units))


def trainer(strategy, **options):
    """A quiet Trainer on this pool's ranks."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"enable_checkpointing": False, "max_steps": 5, "use_distributed_sampler": False, "limit_val_batches": 0}
    if dist.get_rank() == 0:
        options.setdefault("default_root_dir", tempfile.mkdtemp())
    return L.Trainer(
        strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), **{**quiet, **defaults, **options}
    )


def trained(strategy, name, optimizer, dtype, **options):
    """Whole state dict (rank 0) and this rank's losses after training."""
    plugins = [OSDPPrecision("64-true")] if dtype == "float64" and isinstance(strategy, OSDPStrategy) else None
    if dtype == "float64" and plugins is None:
        options["precision"] = "64-true"
    module = build(name, optimizer, dtype)
    fit = trainer(strategy, plugins=plugins, **options)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    state = fit.strategy.lightning_module_state_dict()
    return {key: value.detach().cpu().clone() for key, value in state.items()}, module.losses, fit


def reference(name, optimizer, dtype, *, world_size, steps=5, num_micro_batches=1, clip=None):
    """Trains in one process with plain torch at the same global batch, and returns the state."""
    module = build(name, optimizer, dtype)
    loaders = [iter(module.loader(rank, world_size)) for rank in range(world_size)]
    configured = module.configure_optimizers()
    for _ in range(steps):
        configured.zero_grad()
        for _ in range(num_micro_batches):
            for loader in loaders:
                (module.loss(next(loader)) / world_size / num_micro_batches).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        configured.step()
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def largest_difference(found, expected):
    """Largest absolute difference over all entries; the names must be equal, in order."""
    assert list(found) == list(expected), (list(found), list(expected))
    assert all(found[key].shape == expected[key].shape for key in expected)
    return max(float((found[key] - expected[key]).abs().max()) for key in expected if expected[key].numel())


NODE_SIZE = 2
MODES_OF_NODES = {
    "hpz": ["hpZ"],
    "mixed": ["hpZ", "DP", "ZDP"],
    "hsdp": ["HSDP"],
    "hdp": ["HDP"],
    "all": ["hpZ", "HSDP", "DP", "HDP", "ZDP"],
}
ROOTS = {"hdp": "HDP", "all": "HDP"}
"""Modes of the root, where it is not DP."""
OVER_ALL, IN_NODES = ["ZDP", "hpZ", "DP"], ["HSDP", "HDP"]


def staying(mode):
    """Modes that a unit in this one may change to: those that shard it over the same ranks."""
    return IN_NODES if mode in IN_NODES else OVER_ALL


def in_nodes(plan, modes, sync="every", sliced=()):
    """The plan with these modes in turn, and with gradients reduced in these micro-batches.

    Args:
        plan: a plan of units with one slice.
        modes: one of `MODES_OF_NODES`.
        sync: synchronisation of all units but the root; "last" in place of "node", where there is no such choice.
        sliced: ends of the names of units that get two slices.
    """
    units = []
    for unit, mode in zip(plan.units, itertools.cycle(MODES_OF_NODES[modes]), strict=False):
        if unit.name:
            chosen = staying(mode)[:2] if unit.name.endswith(tuple(sliced)) else [mode]
            reduces = "last" if sync == "node" and mode not in IN_NODES else sync
            units.append(unit.in_modes(*tuple(chosen), sync=reduces))
        else:
            units.append(unit.in_modes(ROOTS.get(modes, "DP")))
    return dataclasses.replace(plan, units=tuple(units), node_size=NODE_SIZE)


SPACE = SearchSpace(modes=WEIGHTS, min_unit_bytes=1024, activations=WITHOUT_LEVELS)


def shared_folder():
    """A new folder that all ranks know."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    return Path(path[0])


def failure(work):
    """Type and text of the error that this raises."""
    try:
        work()
    except OSDPError as error:
        return type(error).__name__, str(error)
    return None


@without_measuring
def fitted(strategy, module, **options):
    fit = trainer(strategy, **options)
    fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    return fit


def moving(plan, exchanges, mode=STATIONARY):
    """The plan with units that move activations, each of a kind of exchange and the names of its operators."""
    units = list(plan.units)
    for kind, operators in exchanges:
        own = [unit for unit in units if unit.name and set(unit.operators) <= set(operators)]
        modules = operators if len(operators) > 1 else ()
        unit = dataclasses.replace(
            own[0], operators=operators, modules=modules, treatments=(mode,), exchange=kind, parameter_bytes=0
        )
        units[units.index(own[0])] = unit
        units = [each for each in units if each not in own[1:]]
    return dataclasses.replace(plan, units=tuple(units))
