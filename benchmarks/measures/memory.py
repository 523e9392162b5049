"""Peak memory of one step: predicted, and counted while Lightning's Trainer takes it as rank 0 of N."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.families import FAMILIES, build
from benchmarks.measures import peaks
from benchmarks.measures.section import Section
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.memory import count_step
from lightning_osdp import Plan, profile_model
from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.core.modes import DP, SYNC_CHOICES, ZDP, ShardingMode
from lightning_osdp.core.plan import Block, Unit
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.rates import DeviceRates
from lightning_osdp.core.units import UnitProfile, partition
from lightning_osdp.cost import Workload
from lightning_osdp.engine import FSDP1
from lightning_osdp.profiler import ComputePrecision
from lightning_osdp.simulation import StepEstimate, planned_units, simulate_step

WORLD_SIZES = (2, 3, 8, 64)
MICRO_BATCHES = (1, 3, 8)
OPTIMIZERS = ("adamw", "sgd_momentum", "adamw_foreach")
NUM_MICRO_BATCHES = (1, 4)
PRECISIONS = ("32-true", "bf16-mixed")
PROFILED_SAMPLES = 4
"""None of `MICRO_BATCHES`: what is predicted for them is extrapolated."""
FREE = Link(latency_s=0.0, seconds_per_byte=0.0)
ANY_RATES = DeviceRates(flops_per_s={"float32": 1e12, "bfloat16": 1e12}, bytes_per_s=1e11)
"""Nothing is timed then: only bytes are asked for."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan under one workload."""

    family: str
    modes: str
    """``zdp``, ``dp``, or ``mix`` for modes that are drawn."""
    sync: str = "every"
    """Which micro-batches reduce gradients: ``every``, ``last``, or ``mix``, drawn per unit."""
    most_slices: int = 1
    """More than one: operators that can be split are, or stay whole, as is drawn; so are the modes of their slices."""
    activations: str = "keep"
    """What blocks do with what they save: ``keep``, ``recompute``, or ``mix``, drawn per block."""
    world_size: int
    micro_batch_size: int
    optimizer: str
    num_micro_batches: int
    precision: str
    backward_prefetch: str
    min_unit_bytes: int
    seed: int


def draw_cases(family: str, count: int, *, seed: int = 0) -> list[Case]:
    """Random cases of one family, the same for the same seed."""
    draw = random.Random(f"{family} {seed}")
    return [
        Case(
            family=family,
            modes=draw.choice(("zdp", "dp", "mix", "mix")),
            sync=random.Random(f"{family} {seed} {index} sync").choice(("every", "last", "mix", "mix")),
            most_slices=random.Random(f"{family} {seed} {index} slices").choice((1, 4)),
            activations=random.Random(f"{family} {seed} {index} blocks").choice(("keep", "recompute", "mix")),
            world_size=draw.choice(WORLD_SIZES),
            micro_batch_size=draw.choice(MICRO_BATCHES),
            optimizer=draw.choice(OPTIMIZERS),
            num_micro_batches=draw.choice(NUM_MICRO_BATCHES),
            precision=draw.choice(PRECISIONS),
            backward_prefetch=draw.choice(("pre", "none", "post")),
            min_unit_bytes=draw.choice((0, 4096, 65536)),
            seed=index,
        )
        for index in range(count)
    ]


def section(num_cases: int) -> Section:
    """Random cases of every family, on rank 0 of N.

    Args:
        num_cases: of each.
    """
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
        counted = count_step(build(case.family, optimizer=case.optimizer), plan, precision=case.precision)
    return peaks.compared(phases(estimate), counted.phases)


def predict(case: Case, *, rank: int = 0, reduce_scatter_copies: bool = False) -> tuple[StepEstimate, Plan]:
    """The simulated step of a case on one rank, and the plan to train with.

    Args:
        case: what to predict.
        rank: whose memory.
        reduce_scatter_copies: as in `Cluster`: true of gloo.
    """
    profile = _profile(case.family, case.optimizer, case.precision)
    plan = _plan(profile, partition(profile, min_unit_bytes=case.min_unit_bytes), case)
    cluster = Cluster(
        world_size=case.world_size,
        all_gather=FREE,
        reduce_scatter=FREE,
        reduce_scatter_copies=reduce_scatter_copies,
    )
    estimate = simulate_step(
        *planned_units(plan, profile),
        cluster,
        Workload(micro_batch_size=case.micro_batch_size, num_micro_batches=case.num_micro_batches),
        engine=FSDP1(backward_prefetch=case.backward_prefetch),
        rank=rank,
    )
    return estimate, plan


@cache
def _profile(family: str, optimizer: str, precision: str) -> ModelProfile:
    dtype = torch.bfloat16 if precision == "bf16-mixed" else None
    module = build(family, optimizer=optimizer)
    return profile_model(
        module,
        module.batch(PROFILED_SAMPLES),
        precision=ComputePrecision(dtype, (_BatchNorm,)),
        context=lambda: torch.autocast("cpu", dtype=dtype, enabled=dtype is not None),
        rates=ANY_RATES,
    )


def phases(estimate: StepEstimate) -> dict[str, int]:
    """Predicted peak of each phase."""
    found: dict[str, int] = {}
    for _, moment in estimate.moments:
        found[moment.phase] = max(found.get(moment.phase, 0), round(moment.num_bytes))
    return found


def _modes(case: Case, units: Sequence[UnitProfile]) -> list[ShardingMode]:
    draw = random.Random(f"{case.family} {case.seed} modes")
    choices = {"zdp": (ZDP,), "dp": (DP,), "mix": (ZDP, DP)}[case.modes]
    modes = [DP if unit.is_root else draw.choice(choices) for unit in units]
    syncs = SYNC_CHOICES if case.sync == "mix" else (case.sync,)
    can_wait = case.num_micro_batches > 1 and case.world_size > 1
    return [
        replace(mode, sync=draw.choice(syncs)) if can_wait and not unit.is_root else mode
        for unit, mode in zip(units, modes, strict=True)
    ]


def _modes_of_slices(case: Case, unit: UnitProfile, mode: ShardingMode) -> tuple[str, ...]:
    """The unit's mode, or one for each slice of its operator where it is split."""
    cuts = [operator.cut for operator in unit.operators if operator.cut is not None and operator.name == unit.name]
    if case.most_slices == 1 or len(unit.operators) != 1 or not cuts:
        return (mode.name,)
    draw = random.Random(f"{case.family} {case.seed} {unit.name} slices")
    number = min(draw.randint(1, case.most_slices), cuts[0].num_features)
    choices = (ZDP.name, DP.name) if case.modes == "mix" else (mode.name,)
    return tuple(draw.choice(choices) for _ in range(number)) if number > 1 else (mode.name,)


def _blocks(profile: ModelProfile, case: Case) -> tuple[Block, ...]:
    draw = random.Random(f"{case.family} {case.seed} activations")
    choices = ("keep", "recompute") if case.activations == "mix" else (case.activations,)
    chosen = [(block.name, draw.choice(choices)) for block in profile.blocks]
    return tuple(Block(name=name, activations=choice) for name, choice in chosen if choice != "keep")


def _plan(profile: ModelProfile, units: Sequence[UnitProfile], case: Case) -> Plan:
    return Plan(
        fingerprint=profile.fingerprint,
        world_size=case.world_size,
        units=tuple(
            Unit(
                name=unit.name,
                operators=tuple(operator.name for operator in unit.operators),
                kind=unit.kind,
                modes=_modes_of_slices(case, unit, mode),
                sync=mode.sync,
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
    )
