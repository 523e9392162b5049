"""What the strategy itself costs: blocks sharded by hand, by Lightning's strategy, and by OSDP's under such a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
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
    """Seconds of every step of each."""
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
    """One line for each model and pair."""
    drawn = Table(
        "model", "step time of", "over that of", title="All blocks sharded: ratios of steps that followed each other"
    )
    for column in ("median", "95% sure to lie in", "fastest steps"):
        drawn.add_column(column, justify="right")
    for row in rows:
        seconds = row["seconds"]
        for name, over in ((LIGHTNING, BY_HAND), (OSDP, BY_HAND), (OSDP, LIGHTNING)):
            ratios = ratios_of(seconds[name], seconds[over])
            least, most = interval_of_median(ratios)
            fastest = min(seconds[name]) / min(seconds[over])
            found = (f"{median(ratios):.3f}", f"{least:.3f} to {most:.3f}", f"{fastest:.3f}")
            drawn.add_row(row["case"]["model"], name, over, *found)
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """OSDP's step takes no longer than the others', on the median."""
    return [
        Target(
            name=f"{row['case']['model']}: step time over that of {other}",
            limit=WITHIN,
            measured=median(ratios_of(row["seconds"][OSDP], row["seconds"][other])),
        )
        for row in rows
        for other in (BY_HAND, LIGHTNING)
    ]


def ratios_of(seconds: Sequence[float], over: Sequence[float]) -> list[float]:
    """Of steps of the same round."""
    return [one / other for one, other in zip(seconds, over, strict=True)]


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95%, whatever the distribution: between ranks n/2 -+ 0.98 sqrt(n), a binomial's.

    Example:
        >>> interval_of_median(range(100))
        (39, 60)
    """
    ordered, num_values = sorted(values), len(values)
    first = max(0, math.floor(num_values / 2 - 0.98 * math.sqrt(num_values)) - 1)
    return ordered[first], ordered[num_values - 1 - first]
