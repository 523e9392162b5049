"""Peak memory of two large layers in slices: predicted, and counted on rank 0 of eight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from rich.table import Table

from benchmarks.families.dense import TwoLayers
from benchmarks.measures.accuracy import peaks
from benchmarks.measures.accuracy.memory import ANY_RATES, FREE, phases
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.plans import plan_of
from lightning_osdp import Cluster, ModelProfile, Plan, profile_model
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.simulation import simulate

HIDDEN_SIZES = (1024, 2048, 4096, 8192, 12288)
NUM_SLICES = (1, 2, 4, 8, 16)
MODES = ("ZDP", "DP")
WORLD_SIZE, NUM_SAMPLES = 8, 16
PROMISED = {8192: 0.5, 12288: 0.5}
"""Hidden size -> fraction of the whole layers' peak that the best number of slices stays below."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Both layers in as many slices, all of them in one mode."""

    hidden_size: int
    num_slices: int
    mode: str


def section(hidden_sizes: Sequence[int]) -> Section:
    """All numbers of slices, all ZDP and all DP."""
    return Section(
        name="peaks",
        cases=[
            Case(hidden_size=hidden_size, num_slices=num_slices, mode=mode)
            for hidden_size in hidden_sizes
            for mode in MODES
            for num_slices in NUM_SLICES
        ],
        measure=measure,
        table=table,
        targets=targets,
    )


def measure(case: Case) -> dict[str, Any]:
    """Predicts a step and counts it; returns what `memory.measure` does."""
    module = TwoLayers(case.hidden_size)
    plan = plan_for(module, case.mode, case.num_slices, world_size=WORLD_SIZE, num_samples=NUM_SAMPLES)
    profile = _profile(case.hidden_size)
    cluster = Cluster(world_size=WORLD_SIZE, all_gather=FREE, reduce_scatter=FREE, reduce_scatter_copies=False)
    estimate = simulate(plan, profile, cluster)
    with fake_group(WORLD_SIZE):
        counted = count_step(module, plan)
    return peaks.compared(phases(estimate), counted.phases)


def plan_for(module: TwoLayers, mode: str, num_slices: int, *, world_size: int, num_samples: int) -> Plan:
    """Both layers in as many slices of one mode, without prefetching."""
    return plan_of(
        module,
        {f"layers.{index}": (mode,) * num_slices for index in range(2)},
        world_size=world_size,
        micro_batch_size=num_samples,
        backward_prefetch="none",
    )


@cache
def _profile(hidden_size: int) -> ModelProfile:
    with torch.device("meta"):
        module = TwoLayers(hidden_size)
    return profile_model(module, module.batch(NUM_SAMPLES), rates=ANY_RATES)


def table(rows: Sequence[Row]) -> Table:
    """One line per size and mode."""
    drawn = Table("hidden size", "mode", title=f"Peak of a step of two layers on rank 0 of {WORLD_SIZE}, counted")
    for column in (*(f"{num_slices} slices" for num_slices in NUM_SLICES), "best"):
        drawn.add_column(column, justify="right")
    for hidden_size, mode in dict.fromkeys((row["case"]["hidden_size"], row["case"]["mode"]) for row in rows):
        found = _of(rows, hidden_size, mode)
        drawn.add_row(
            f"2 x {hidden_size}",
            mode,
            *(format_bytes(peak(row)) for row in found),
            f"{peak(best(found)) / peak(found[0]) - 1:+.0%}",
        )
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """What splitting is to save, and the worst predictions."""
    found = []
    for hidden_size, limit in PROMISED.items():
        of_size = _of(rows, hidden_size, "ZDP")
        if of_size:
            name = f"2 x {hidden_size}: peak with {best(of_size)['case']['num_slices']} slices over that of one"
            found.append(Target(name=name, limit=limit, measured=peak(best(of_size)) / peak(of_size[0])))
    return [*found, *peaks.targets(rows, "peaks")]


def peak(row: Row) -> int:
    """Bytes that were counted."""
    return int(max(row["counted"].values()))


def best(rows: Sequence[Row]) -> Row:
    """The number of slices with the lowest peak."""
    return min(rows, key=peak)


def _of(rows: Sequence[Row], hidden_size: int, mode: str) -> list[Row]:
    return [row for row in rows if (row["case"]["hidden_size"], row["case"]["mode"]) == (hidden_size, mode)]
