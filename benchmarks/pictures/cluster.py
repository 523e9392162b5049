"""The picture of simulated machines: OSDP's samples/s over the best FSDP's; it needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measures.section import Row
from benchmarks.measures.simulated.tables import OSDP, over_best, where
from benchmarks.pictures import save

_COLOURS = ("#0072B2", "#D55E00", "#009E73")
_HEIGHT = 0.26
"""Of a bar; cases are 1 apart."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Three bars for each case; none of who does not fit, and none at all where no FSDP does."""
    figure = Figure(figsize=(9.0, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for number, (name, colour) in enumerate(zip(OSDP, _COLOURS, strict=True)):
        ratios = [over_best(row, name) or 0.0 for row in rows]
        places = [place + (number - 1) * _HEIGHT for place in range(len(rows))]
        axes.barh(places, ratios, height=_HEIGHT, color=colour, label=name)
    axes.axvline(1.0, color="#666666", linewidth=0.8)
    axes.set_yticks(
        range(len(rows)), ["\n".join((f"{layers}, {limit}", machine)) for machine, layers, limit in map(where, rows)]
    )
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="simulated samples/s over those of the best FSDP that may do no more")
    figure.legend(loc="outside upper center", ncols=len(OSDP))
    save(figure, path)
