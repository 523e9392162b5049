"""Peak memory of one step: predicted, and counted while Lightning's Trainer takes it as rank 0 of N."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import MixedPrecision
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.families import FAMILIES, Family, build
from benchmarks.measures.accuracy import peaks
from benchmarks.measures.section import Section
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.memory import StepBytes, count_step
from lightning_osdp import OSDPStrategy, Plan, TrainingStep, profile_model
from lightning_osdp.core.axes import DP, HDP, NAMED_MODES, REPLICATED, RESIDENT, ZDP, Treatment, named
from lightning_osdp.core.cluster import Cluster, DeviceRates, Link
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile, partition
from lightning_osdp.planner.engine import engine_of
from lightning_osdp.planner.simulation import StepEstimate, planned_step, simulate_step
from lightning_osdp.profiler import ComputePrecision

T = TypeVar("T")

WORLD_SIZES = (2, 3, 8, 64)
MICRO_BATCHES = (1, 3, 8)
OPTIMIZERS = ("adamw", "sgd_momentum", "adamw_foreach")
NUM_MICRO_BATCHES = (1, 4)
PRECISIONS = ("32-true", "bf16-mixed")
REDUCE_DTYPES = ("bfloat16", "float32")
"""Dtypes that gradients are reduced in where computing is in bfloat16."""
FROZEN_OF_MIX = 0.3
FROZEN = ("nothing", "nothing", "first", "mix")
PROFILED_SAMPLES = 4
"""Samples that are profiled, none of `MICRO_BATCHES`: what is predicted for those is extrapolated."""
FREE = Link(latency_s=0.0, seconds_per_byte=0.0)
ANY_RATES = DeviceRates(flops_per_s={"float32": 1e10, "bfloat16": 1e10}, bytes_per_s=1e12)
"""Rates that stand in for timing, because only bytes are asked for: products are dear, so that blocks have levels."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan under one workload."""

    family: str
    modes: str
    """Modes: ``zdp``, ``dp``, ``mix``, which is drawn, or ``nodes``, drawn from modes that need several nodes, too."""
    sync: str = "every"
    """Micro-batches that reduce gradients: ``every``, ``last``, or ``mix``, drawn per unit."""
    most_slices: int = 1
    """Most slices; above 1, operators that can be split are or stay whole, as is drawn, like the modes of slices."""
    activations: str = "keep"
    """Choice of blocks for what they save: ``keep``, ``recompute``, ``mix``, drawn per block, or ``levels``, likewise
    drawn, with all levels of a block among them."""
    frozen: str = "nothing"
    """Frozen modules: ``nothing``, the ``first`` third of the modules that own parameters, or a ``mix`` of them
    that is drawn."""
    world_size: int
    node_size: int | None = None
    """Ranks of a node."""
    micro_batch_size: int
    optimizer: str
    num_micro_batches: int
    precision: str
    reduce_dtype: str = "float32"
    """Dtype that gradients are reduced in; as they are computed under ``32-true``."""
    backward_prefetch: str
    forward_prefetch: bool = False
    asynchronous_unshard: bool = True
    min_unit_bytes: int
    seed: int


def draw_cases(family: str, count: int, *, seed: int = 0) -> list[Case]:
    """Random cases of one family, the same for the same seed."""
    draw = random.Random(f"{family} {seed}")

    def apart(index: int, what: str, choices: Sequence[T]) -> T:
        """Draws a choice by itself, so that the others are what they are without it."""
        return random.Random(f"{family} {seed} {index} {what}").choice(choices)

    return [
        Case(
            family=family,
            modes=draw.choice(("zdp", "dp", "mix", "mix")),
            sync=apart(index, "sync", ("every", "last", "mix", "mix")),
            most_slices=apart(index, "slices", (1, 4)),
            activations="levels"
            if apart(index, "levels", (False, False, True))
            else apart(index, "blocks", ("keep", "recompute", "mix")),
            frozen=apart(index, "frozen", FROZEN),
            world_size=draw.choice(WORLD_SIZES),
            micro_batch_size=draw.choice(MICRO_BATCHES),
            optimizer=draw.choice(OPTIMIZERS),
            num_micro_batches=draw.choice(NUM_MICRO_BATCHES),
            precision=draw.choice(PRECISIONS),
            reduce_dtype=apart(index, "reduce", REDUCE_DTYPES),
            backward_prefetch=draw.choice(("pre", "none")),
            forward_prefetch=apart(index, "ahead", (False, True)),
            asynchronous_unshard=apart(index, "asynchronous", (False, True)),
            min_unit_bytes=draw.choice((0, 4096, 65536)),
            seed=index,
        )
        for index in range(count)
    ]


def section(num_cases: int) -> Section:
    """Random cases of every family, on rank 0 of N."""
    title = "Peak memory of one step, against a count of live storages on rank 0 of N"
    return Section(
        name="memory",
        cases=[case for family in FAMILIES for case in draw_cases(family, num_cases)],
        measure=measure,
        table=partial(peaks.table, title=title),
        targets=partial(peaks.targets, name="memory"),
        misses=peaks.misses,
    )


def measure(case: Case) -> dict[str, Any]:
    """Predicts the case's step and counts it on the ``fake`` process group.

    Returns:
        Bytes by phase under ``predicted`` and ``counted``, and the ``error`` of the whole step's peak, which is
        positive where it was predicted too high.
    """
    estimate, plan = predict(case)
    with fake_group(case.world_size):
        counted = count(case, plan)
    return peaks.compared(phases(estimate), counted.phases)


def count(case: Case, plan: Plan, *, num_steps: int = 1, keeps_curve: bool = False) -> StepBytes:
    """Counts the step of a case on this rank of the default process group; arguments as of `count_step`."""
    strategy = OSDPStrategy(
        plan=plan, batch_size="keep", mixed_precision=_mixed_precision(case), node_size=case.node_size
    )
    return count_step(
        _built(case.family, case.optimizer, case.frozen, case.seed),
        plan,
        precision=case.precision,
        num_steps=num_steps,
        keeps_curve=keeps_curve,
        strategy=strategy,
    )


def _mixed_precision(case: Case) -> MixedPrecision | None:
    if case.precision == "32-true":
        return None
    return MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, case.reduce_dtype))


def _built(family: str, optimizer: str, frozen: str, seed: int) -> Family:
    module = build(family, optimizer=optimizer)
    owners = [child for child in module.modules() if next(child.parameters(recurse=False), None) is not None]
    draw = random.Random(f"{family} {seed} frozen")
    chosen = {
        "nothing": [],
        "first": owners[: len(owners) // 3],
        "mix": [child for child in owners[:-1] if draw.random() < FROZEN_OF_MIX],  # the last one is trained
    }
    for child in chosen[frozen]:
        for parameter in child.parameters(recurse=False):
            parameter.requires_grad_(False)
    return module


def predict(case: Case, *, rank: int = 0, reduce_scatter_copies: bool = False) -> tuple[StepEstimate, Plan]:
    """The simulated step of a case on one rank, and the plan to train with.

    Args:
        case: what to predict.
        rank: whose memory.
        reduce_scatter_copies: as in `Cluster`: true of gloo.
    """
    profile = _profile(case)
    plan = _plan(profile, partition(profile, min_unit_bytes=case.min_unit_bytes), case)
    cluster = Cluster(
        world_size=case.world_size,
        all_gather=FREE,
        reduce_scatter=FREE,
        reduce_scatter_copies=reduce_scatter_copies,
        node_size=case.node_size,
    )
    estimate = simulate_step(*planned_step(plan, profile, cluster), engine=engine_of(plan), rank=rank)
    return estimate, plan


def _profile(case: Case) -> ModelProfile:
    return _profiled(
        case.family,
        case.optimizer,
        case.frozen,
        seed=case.seed if case.frozen == "mix" else 0,
        precision=case.precision,
        reduce_dtype=case.reduce_dtype,
    )


@cache
def _profiled(
    family: str, optimizer: str, frozen: str, *, seed: int, precision: str, reduce_dtype: str
) -> ModelProfile:
    is_mixed = precision == "bf16-mixed"
    dtype, reduced = (torch.bfloat16, getattr(torch, reduce_dtype)) if is_mixed else (None, None)
    module = _built(family, optimizer, frozen, seed)

    def run(batch: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype, enabled=is_mixed):
            return module.loss(batch)

    step = TrainingStep(run, precision=ComputePrecision(dtype, (_BatchNorm,), reduced))
    activations = ("keep", "recompute", "selective")
    return profile_model(module, module.batch(PROFILED_SAMPLES), step, rates=ANY_RATES, activations=activations)


def phases(estimate: StepEstimate) -> dict[str, int]:
    """Predicted peak of each phase."""
    found: dict[str, int] = {}
    for _, moment in estimate.moments:
        found[moment.phase] = max(found.get(moment.phase, 0), round(moment.num_bytes))
    return found


_TRAINED = {
    name: mode for name, mode in NAMED_MODES.items() if mode not in (RESIDENT, REPLICATED) and "moves" not in mode
}
"""Modes of units that may be trained in any precision, and that gather them."""


def _modes(case: Case, units: Sequence[UnitProfile]) -> list[Treatment]:
    draw = random.Random(f"{case.family} {case.seed} modes")
    choices = {"zdp": (ZDP,), "dp": (DP,), "mix": (ZDP, DP), "nodes": (*_TRAINED.values(),)}[case.modes]
    roots = (DP, HDP) if case.modes == "nodes" else (DP,)
    modes = [draw.choice(roots) if unit.is_root else draw.choice(choices) for unit in units]
    syncs = ["every", "last"] if case.sync == "mix" else [case.sync]
    can_wait = case.num_micro_batches > 1 and case.world_size > 1
    return [
        mode.but(sync=draw.choice([*syncs, "node"] if mode["home"] == "node" else syncs))
        if can_wait and not unit.is_root
        else mode
        for unit, mode in zip(units, modes, strict=True)
    ]


def _modes_of_slices(case: Case, unit: UnitProfile, mode: Treatment) -> tuple[str, ...]:
    """The unit's mode, or one for each slice of its operator where it is split."""
    cuts = [operator.cut for operator in unit.operators if operator.cut is not None and operator.name == unit.name]
    if case.most_slices == 1 or case.activations == "levels" or len(unit.operators) != 1 or not cuts:
        return (mode.name,)
    draw = random.Random(f"{case.family} {case.seed} {unit.name} slices")
    number = min(draw.randint(1, case.most_slices), cuts[0].num_features)
    alike = tuple(name for name, each in _TRAINED.items() if each["home"] == mode["home"])
    choices = {"mix": (ZDP.name, DP.name), "nodes": alike}.get(case.modes, (mode.name,))
    return tuple(draw.choice(choices) for _ in range(number)) if number > 1 else (mode.name,)


def _blocks(profile: ModelProfile, case: Case) -> tuple[Block, ...]:
    draw = random.Random(f"{case.family} {case.seed} activations")
    is_drawn = case.activations in ("mix", "levels")
    choices = ("keep", "recompute") if is_drawn else (case.activations,)
    chosen = [
        (block, draw.choice((*choices, *block.levels) if case.activations == "levels" else choices))
        for block in profile.blocks
    ]
    return tuple(
        Block(
            name=block.name,
            treatment=Treatment(saves=choice),
            kept=block.levels[choice].kept if choice in block.levels else (),
        )
        for block, choice in chosen
        if choice != "keep"
    )


def _plan(profile: ModelProfile, units: Sequence[UnitProfile], case: Case) -> Plan:
    return Plan(
        fingerprint=profile.fingerprint,
        world_size=case.world_size,
        node_size=case.node_size,
        units=tuple(
            Unit(
                name=unit.name,
                operators=tuple(operator.name for operator in unit.operators),
                kind=unit.kind,
                treatments=named(*_modes_of_slices(case, unit, mode), sync=mode["sync"]),
            )
            for unit, mode in zip(units, _modes(case, units), strict=True)
        ),
        blocks=_blocks(profile, case),
        memory_limit_bytes=2**62,
        peak_bytes=0,
        micro_batch_size=case.micro_batch_size,
        num_micro_batches=case.num_micro_batches,
        step_time_s=0.0,
        samples_per_s=0.0,
        gap=0.0,
        backward_prefetch=case.backward_prefetch,
        forward_prefetch=case.forward_prefetch,
        asynchronous_unshard=case.asynchronous_unshard,
    )
