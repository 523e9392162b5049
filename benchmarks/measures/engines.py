"""Engines beside each other, ``fully_shard`` by hand and Lightning's strategies: step times, peaks, where time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.families import build
from benchmarks.measures.links import on_links_that_can_be_had, on_ranks, rate_of
from benchmarks.measures.section import Row, Section
from benchmarks.measures.wrapper import WITHIN, interval_of_median, ratios_of
from benchmarks.target import Target
from benchmarks.testbed.breakdown import OPTIMIZER, WHOLE, host_times
from benchmarks.testbed.engines import BY_HAND, BY_HAND_ON_ROWS, CONTESTANTS, FSDP1, FSDP2
from examples.mingpt.model import Block
from lightning_osdp.core.byte_size import format_bytes

LEAST = {200.0: 0.97, 1000.0: 0.95}
"""Samples/s of FSDP2 over FSDP1's, by the rate of links in Mbit/s."""
MOST_DISPATCH = 0.03
"""Of a step, that the optimizer takes longer than on plain tensors."""
MOST_UNITS = 1.0
"""Bytes of the largest unit, whole, that FSDP2's peak may be above FSDP1's."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """All blocks of a model in one mode, one sample a step and rank."""

    model: str
    mode: str
    num_ranks: int
    rate_mbit: float | None = None
    """10^6 bit/s; None: not shaped."""
    num_rounds: int
    """Steps; of the peak, none."""
    fsdp1_apart: bool = False
    """Whether FSDP1 is that of another version, in processes of its own; `BY_HAND` runs there, too."""


def times(cases: Sequence[Case], fsdp1: Path | None) -> Section:
    """Seconds of all steps, of contestants that take turns.

    Args:
        cases: those on links that cannot be had here are left out.
        fsdp1: folder of the version that FSDP1 is of; None: this one.
    """
    return Section(
        name="times",
        cases=on_links_that_can_be_had(cases),
        measure=partial(_measured, "seconds", fsdp1),
        table=times_table,
        targets=times_targets,
        misses=lambda _: [],
    )


def peaks(cases: Sequence[Case], fsdp1: Path | None) -> Section:
    """Bytes of live storages at the peak of a step, on rank 0; arguments as of `times`."""
    return Section(
        name="peaks",
        cases=cases,
        measure=partial(_measured, "bytes", fsdp1),
        table=peaks_table,
        targets=peaks_targets,
        misses=lambda _: [],
    )


def breakdown(cases: Sequence[Case]) -> Section:
    """Where the time of a step on FSDP2 goes: on a rank of several, and on one alone."""
    return Section(
        name="breakdown",
        cases=cases,
        measure=_broken_down,
        table=breakdown_table,
        targets=breakdown_targets,
        misses=lambda _: [],
    )


def _measured(what: str, fsdp1: Path | None, case: Case) -> dict[str, Any]:
    given: dict[str, Any] = {"model": case.model, "mode": case.mode}
    function = "peaks"
    if what == "seconds":
        function, given = "times", {**given, "num_rounds": case.num_rounds}
    run = partial(on_ranks, case.num_ranks, case.rate_mbit, f"benchmarks.testbed.engines:{function}", **given)
    here = [each for each in CONTESTANTS if fsdp1 is None or each != FSDP1]
    apart = {} if fsdp1 is None else run(root=fsdp1, contestants=[BY_HAND, FSDP1])
    return {what: run(contestants=here), "apart": apart}


def _broken_down(case: Case) -> dict[str, Any]:
    given: dict[str, Any] = {"model": case.model, "mode": case.mode, "num_rounds": case.num_rounds}
    wall = on_ranks(case.num_ranks, case.rate_mbit, "benchmarks.testbed.breakdown:wall_times", **given)
    return {"wall_s": wall, "host_s": host_times(world_size=case.num_ranks, **given)}


def times_ratio(row: Row, name: str, over: str) -> float:
    """Median of the step times of one over those of another; what ran apart is compared through `BY_HAND`."""
    seconds, apart = row["seconds"], row["apart"]
    if name in seconds and over in seconds:
        return median(ratios_of(seconds[name], seconds[over]))
    to_by_hand = []
    for each in (name, over):
        of = seconds if each in seconds else apart
        to_by_hand.append(median(ratios_of(of[each], of[BY_HAND])))
    return to_by_hand[0] / to_by_hand[1]


def times_table(rows: Sequence[Row]) -> Table:
    """One line for each case and contestant."""
    drawn = Table("model", "blocks", "links", "contestant", title="Step times in turns, over those by hand")
    for column in ("median step", "over by hand", "95% sure to lie in"):
        drawn.add_column(column, justify="right")
    for row in rows:
        case = row["case"]
        for of in (row["seconds"], row["apart"]):
            for name, steps in of.items():
                if of is row["apart"] and name == BY_HAND:
                    continue
                ratios = ratios_of(steps, of[BY_HAND])
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
    """FSDP2 trains as many samples/s as FSDP1, nearly; OSDP costs nothing over what one writes by hand."""
    found = []
    for row in rows:
        case = row["case"]
        where = f"{case['model']}, {case['mode']}, {rate_of(row)}"
        if case["rate_mbit"] in LEAST:
            speed, least = times_ratio(row, FSDP1, FSDP2), LEAST[case["rate_mbit"]]
            found.append(Target(name=f"{where}: samples/s over FSDP1's", limit=least, measured=speed, is_least=True))
        found += [
            Target(name=f"{where}: step time over {other}", limit=WITHIN, measured=times_ratio(row, FSDP2, other))
            for other in (BY_HAND, BY_HAND_ON_ROWS)
        ]
    return found


def peaks_table(rows: Sequence[Row]) -> Table:
    """One line for each case and contestant."""
    drawn = Table("model", "blocks", "contestant", title="Peaks of a step, counted")
    for column in ("peak", "units above FSDP1's"):
        drawn.add_column(column, justify="right")
    for row in rows:
        for name, num_bytes in {**row["apart"], **row["bytes"]}.items():
            drawn.add_row(
                row["case"]["model"], row["case"]["mode"], name, format_bytes(num_bytes), f"{_units(row, name):+.2f}"
            )
    return drawn


def peaks_targets(rows: Sequence[Row]) -> list[Target]:
    """FSDP2 takes little more than FSDP1."""
    return [
        Target(
            name=f"{row['case']['model']}, {row['case']['mode']}: units of memory above FSDP1's",
            limit=MOST_UNITS,
            measured=_units(row, FSDP2),
        )
        for row in rows
    ]


def _units(row: Row, name: str) -> float:
    """How many of the largest unit, whole, the peak is above FSDP1's."""
    found = {**row["apart"], **row["bytes"]}
    difference: int = found[name] - found[FSDP1]
    return difference / _largest_unit_bytes(row["case"]["model"])


def _largest_unit_bytes(model: str) -> int:
    """In float32."""
    blocks = [child for child in build(model).modules() if isinstance(child, Block)]
    return max(4 * sum(parameter.numel() for parameter in block.parameters()) for block in blocks)


def breakdown_table(rows: Sequence[Row]) -> Table:
    """One line for each part."""
    drawn = Table("model", "blocks", "part of a step on FSDP2", title="Where the time of a step goes")
    for column in ("time", "of the step"):
        drawn.add_column(column, justify="right")
    for row in rows:
        wall, host = row["wall_s"], row["host_s"]
        parts = {name: seconds for name, seconds in wall.items() if name != WHOLE}
        lines = [(name, seconds, wall[WHOLE]) for name, seconds in parts.items()]
        lines.append(("all else", wall[WHOLE] - sum(parts.values()), wall[WHOLE]))
        lines.append(("whole step", wall[WHOLE], wall[WHOLE]))
        alone = f"{OPTIMIZER}, over plain tensors'"
        lines.append((f"alone: {alone}", dispatch_s(host), host[FSDP2]))
        lines.append((f"alone: {alone}, with DTensors", _dispatch_of_dtensors_s(host), host[FSDP2]))
        lines.append(("alone: OSDP over by hand, steps on rows", host[FSDP2] - host[BY_HAND_ON_ROWS], host[FSDP2]))
        lines.append(("alone: whole step", host[FSDP2], host[FSDP2]))
        for name, seconds, whole in lines:
            drawn.add_row(
                row["case"]["model"], row["case"]["mode"], name, f"{seconds * 1e3:.2f} ms", f"{seconds / whole:.1%}"
            )
    return drawn


def breakdown_targets(rows: Sequence[Row]) -> list[Target]:
    """The optimizer takes hardly longer than one of plain tensors."""
    return [
        Target(
            name=f"{row['case']['model']}, {row['case']['mode']}: dispatch of the optimizer, of a step",
            limit=MOST_DISPATCH,
            measured=dispatch_s(row["host_s"]) / row["host_s"][FSDP2],
        )
        for row in rows
    ]


def dispatch_s(host: dict[str, float]) -> float:
    """What the optimizer's step takes beside its arithmetic."""
    return host["optimizer on rows"] - host["plain optimizer"]


def _dispatch_of_dtensors_s(host: dict[str, float]) -> float:
    return host["optimizer on DTensors"] - host["plain optimizer"]
