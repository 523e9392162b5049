"""Peaks of Lightning's own FSDP, counted while its Trainer trains, for every division of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.measures.section import Row, Section
from benchmarks.testbed.contest import Baseline, build
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.lightning_fsdp import LightningFSDP, Sharding, lightning_plan
from benchmarks.testbed.memory import count_step
from lightning_osdp.core.byte_size import format_bytes

SHARDINGS: tuple[Sharding, ...] = ("FULL_SHARD", "SHARD_GRAD_OP")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One of Lightning's shardings on rank 0 of N."""

    model: str
    num_ranks: int
    sharding: Sharding
    micro_batch_size: int
    num_micro_batches: int


def section(model: str, num_ranks: int, samples_per_step: int) -> Section:
    """Both shardings with every number of samples that divides those of a step."""
    sizes = [size for size in range(1, samples_per_step + 1) if samples_per_step % size == 0]
    return Section(
        name="baselines",
        cases=[
            Case(
                model=model,
                num_ranks=num_ranks,
                sharding=sharding,
                micro_batch_size=size,
                num_micro_batches=samples_per_step // size,
            )
            for sharding in SHARDINGS
            for size in sizes
        ],
        measure=measure,
        table=table,
        targets=lambda _: [],
        misses=lambda _: [],
    )


def measure(case: Case) -> dict[str, Any]:
    """Counts live bytes in one process as rank 0 of N."""
    with fake_group(case.num_ranks):
        module = build(case.model)
        plan = lightning_plan(
            module,
            case.sharding,
            world_size=case.num_ranks,
            micro_batch_size=case.micro_batch_size,
            num_micro_batches=case.num_micro_batches,
        )
        return {"counted_bytes": count_step(module, plan, strategy=LightningFSDP(case.sharding)).peak_bytes}


def table(rows: Sequence[Row]) -> Table:
    """One line per case."""
    drawn = Table("sharding", "b x K", title="Counted peaks of Lightning's FSDPStrategy")
    drawn.add_column("peak", justify="right")
    for baseline in map(baseline_of, rows):
        division = f"{baseline.micro_batch_size} x {baseline.num_micro_batches}"
        drawn.add_row(baseline.sharding, division, format_bytes(baseline.counted_bytes))
    return drawn


def baseline_of(row: Row) -> Baseline:
    """What was counted of a case."""
    case = row["case"]
    return Baseline(
        sharding=case["sharding"],
        micro_batch_size=case["micro_batch_size"],
        num_micro_batches=case["num_micro_batches"],
        counted_bytes=row["counted_bytes"],
    )
