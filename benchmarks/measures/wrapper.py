"""What the strategy itself costs: blocks sharded by hand, by Lightning's strategy, and by OSDP's under such a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.measures.links import on_ranks
from benchmarks.measures.section import Row, Section
from benchmarks.target import Target
from benchmarks.testbed.wrapper import BY_HAND, LIGHTNING, OSDP

WITHIN = 1.02
"""Of the step time of each of the others."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on ranks of this machine, one sample each."""

    model: str
    num_ranks: int
    num_rounds: int


def section(cases: Sequence[Case]) -> Section:
    """All three in turns."""
    return Section(name="wrapper", cases=cases, measure=measure, table=table, targets=targets, misses=lambda _: [])


def measure(case: Case) -> dict[str, Any]:
    """Seconds of a step of each."""
    seconds = on_ranks(
        case.num_ranks,
        None,
        "benchmarks.testbed.wrapper:on_one_rank",
        model=case.model,
        world_size=case.num_ranks,
        num_rounds=case.num_rounds,
    )
    return {"seconds": seconds}


def table(rows: Sequence[Row]) -> Table:
    """One line for each model."""
    drawn = Table("model", title=f"All blocks sharded: step time over that of {BY_HAND}")
    for name in (LIGHTNING, OSDP):
        drawn.add_column(name, justify="right")
    for row in rows:
        seconds = row["seconds"]
        drawn.add_row(row["case"]["model"], *(f"{seconds[name] / seconds[BY_HAND]:.3f}" for name in (LIGHTNING, OSDP)))
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """OSDP's step takes no longer than the others'."""
    return [
        Target(
            name=f"{row['case']['model']}: step time over that of {other}",
            limit=WITHIN,
            measured=row["seconds"][OSDP] / row["seconds"][other],
        )
        for row in rows
        for other in (BY_HAND, LIGHTNING)
    ]
