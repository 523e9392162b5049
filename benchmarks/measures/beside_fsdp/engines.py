"""OSDP beside ``fully_shard`` by hand and Lightning's strategies: step times, peaks, where time goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.families import build
from benchmarks.measures.links import on_links_that_can_be_had, on_ranks, rate_of
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.beside_fsdp.breakdown import OPTIMIZER, WHOLE, host_times
from benchmarks.testbed.beside_fsdp.engines import BY_HAND, BY_HAND_ON_ROWS, CONTESTANTS, OSDP
from examples.mingpt.model import Block
from lightning_osdp.core.text.byte_size import format_bytes

WITHIN = 1.02
"""Factor on the step time by hand."""
MOST_DISPATCH = 0.03
"""Fraction of a step that the optimizer takes longer than on plain tensors."""
MOST_UNITS = 1.0
"""Bytes of the largest unit, whole, that the peak may be above that by hand."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model with all blocks in one mode, one sample a step and rank."""

    model: str
    mode: str
    num_ranks: int
    rate_mbit: float | None = None
    """Rate of the links in 10^6 bit/s; None: not shaped."""
    num_rounds: int
    """Number of timed steps; without meaning where the peak is counted."""


def times(cases: Sequence[Case]) -> Section:
    """Seconds of all steps, of contestants that take turns; cases on links that cannot be had here are left out."""
    measure, cases = partial(_measured, "seconds"), on_links_that_can_be_had(cases)
    return Section(name="times", cases=cases, measure=measure, table=times_table, targets=times_targets)


def peaks(cases: Sequence[Case]) -> Section:
    """Bytes of live storages at the peak of a step, on rank 0."""
    measure = partial(_measured, "bytes")
    return Section(name="peaks", cases=cases, measure=measure, table=peaks_table, targets=peaks_targets)


def breakdown(cases: Sequence[Case]) -> Section:
    """Section on where the time of a step under OSDP goes: on a rank of several, and on one alone."""
    return Section(
        name="breakdown", cases=cases, measure=_broken_down, table=breakdown_table, targets=breakdown_targets
    )


def _measured(what: str, case: Case) -> dict[str, Any]:
    given: dict[str, Any] = {"model": case.model, "mode": case.mode, "contestants": list(CONTESTANTS)}
    function = "peaks"
    if what == "seconds":
        function, given = "times", {**given, "num_rounds": case.num_rounds}
    return {
        what: on_ranks(case.num_ranks, case.rate_mbit, f"benchmarks.testbed.beside_fsdp.engines:{function}", **given)
    }


def _broken_down(case: Case) -> dict[str, Any]:
    given: dict[str, Any] = {"model": case.model, "mode": case.mode, "num_rounds": case.num_rounds}
    wall = on_ranks(case.num_ranks, case.rate_mbit, "benchmarks.testbed.beside_fsdp.breakdown:wall_times", **given)
    return {"wall_s": wall, "host_s": host_times(world_size=case.num_ranks, **given)}


def times_ratio(row: Row, name: str, over: str) -> float:
    """Median of the step times of one over those of another."""
    return median(ratios_of(row["seconds"][name], row["seconds"][over]))


def times_table(rows: Sequence[Row]) -> Table:
    """One line for each case and contestant."""
    drawn = Table("model", "blocks", "links", "contestant", title="Step times in turns, over those by hand")
    for column in ("median step", "over by hand", "95% sure to lie in"):
        drawn.add_column(column, justify="right")
    for row in rows:
        case = row["case"]
        for name, steps in row["seconds"].items():
            ratios = ratios_of(steps, row["seconds"][BY_HAND])
            least, most = interval_of_median(ratios)
            drawn.add_row(
                case["model"],
                case["mode"],
                rate_of(row),
                name,
                f"{median(steps) * 1e3:.1f} ms",
                f"{median(ratios):.3f}",
                f"{least:.3f} to {most:.3f}",
            )
    return drawn


def times_targets(rows: Sequence[Row]) -> list[Target]:
    """Targets that OSDP costs nothing over what one writes by hand."""
    return [
        Target(
            name=f"{row['case']['model']}, {row['case']['mode']}, {rate_of(row)}: step time over {other}",
            limit=WITHIN,
            measured=times_ratio(row, OSDP, other),
        )
        for row in rows
        for other in (BY_HAND, BY_HAND_ON_ROWS)
    ]


def peaks_table(rows: Sequence[Row]) -> Table:
    """One line for each case and contestant."""
    drawn = Table("model", "blocks", "contestant", title="Peaks of a step, counted")
    for column in ("peak", "units above that by hand"):
        drawn.add_column(column, justify="right")
    for row in rows:
        for name, num_bytes in row["bytes"].items():
            above = _units_above_by_hand(row, name)
            drawn.add_row(row["case"]["model"], row["case"]["mode"], name, format_bytes(num_bytes), f"{above:+.2f}")
    return drawn


def peaks_targets(rows: Sequence[Row]) -> list[Target]:
    """Targets that OSDP takes hardly more than what is written by hand."""
    return [
        Target(
            name=f"{row['case']['model']}, {row['case']['mode']}: units of memory above {BY_HAND}",
            limit=MOST_UNITS,
            measured=_units_above_by_hand(row, OSDP),
        )
        for row in rows
    ]


def _units_above_by_hand(row: Row, name: str) -> float:
    """Bytes of a peak above the peak by hand, over those of the largest unit, whole in float32."""
    blocks = [child for child in build(row["case"]["model"]).modules() if isinstance(child, Block)]
    largest = max(4 * sum(parameter.numel() for parameter in block.parameters()) for block in blocks)
    difference: int = row["bytes"][name] - row["bytes"][BY_HAND]
    return difference / largest


def breakdown_table(rows: Sequence[Row]) -> Table:
    """One line for each part."""
    drawn = Table("model", "blocks", "part of a step under OSDP", title="Where the time of a step goes")
    for column in ("time", "of the step"):
        drawn.add_column(column, justify="right")
    for row in rows:
        wall, host = row["wall_s"], row["host_s"]
        parts = {name: seconds for name, seconds in wall.items() if name != WHOLE}
        lines = [(name, seconds, wall[WHOLE]) for name, seconds in parts.items()]
        lines.append(("all else", wall[WHOLE] - sum(parts.values()), wall[WHOLE]))
        lines.append(("whole step", wall[WHOLE], wall[WHOLE]))
        alone = f"{OPTIMIZER}, over plain tensors'"
        lines.append((f"alone: {alone}", dispatch_s(host), host[OSDP]))
        on_dtensors_s = host["optimizer on DTensors"] - host["plain optimizer"]
        lines.append((f"alone: {alone}, with DTensors", on_dtensors_s, host[OSDP]))
        lines.append(("alone: OSDP over by hand, steps on rows", host[OSDP] - host[BY_HAND_ON_ROWS], host[OSDP]))
        lines.append(("alone: whole step", host[OSDP], host[OSDP]))
        for name, seconds, whole in lines:
            drawn.add_row(
                row["case"]["model"], row["case"]["mode"], name, f"{seconds * 1e3:.2f} ms", f"{seconds / whole:.1%}"
            )
    return drawn


def breakdown_targets(rows: Sequence[Row]) -> list[Target]:
    """Targets that the optimizer takes hardly longer than one of plain tensors."""
    return [
        Target(
            name=f"{row['case']['model']}, {row['case']['mode']}: dispatch of the optimizer, of a step",
            limit=MOST_DISPATCH,
            measured=dispatch_s(row["host_s"]) / row["host_s"][OSDP],
        )
        for row in rows
    ]


def dispatch_s(host: dict[str, float]) -> float:
    """Seconds of the optimizer's step beside its arithmetic."""
    return host["optimizer on rows"] - host["plain optimizer"]


def ratios_of(seconds: Sequence[float], over: Sequence[float]) -> list[float]:
    """Ratios of steps of the same round."""
    return [one / other for one, other in zip(seconds, over, strict=True)]


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Interval of the median with 95%, whatever the distribution: between ranks n/2 -+ 0.98 sqrt(n), a binomial's.

    Example:
        >>> interval_of_median(range(100))
        (39, 60)
    """
    ordered, num_values = sorted(values), len(values)
    first = max(0, math.floor(num_values / 2 - 0.98 * math.sqrt(num_values)) - 1)
    return ordered[first], ordered[num_values - 1 - first]
