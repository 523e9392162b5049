"""The picture of simulated machines: OSDP's samples/s over the best others'; it needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measures.section import Row
from benchmarks.measures.simulated.nodes import SPACES, ratio
from benchmarks.pictures import save

_COLOURS = ("#0072B2", "#D55E00")
_HEIGHT = 0.26
"""Height of a bar; cases are 1 apart."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Two bars for each case in which something that people choose by hand fits."""
    rows = [row for row in rows if ratio(row, "OSDP") is not None]
    figure = Figure(figsize=(9.0, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for number, (name, colour) in enumerate(zip(SPACES, _COLOURS, strict=True)):
        places = [place + (number - (len(SPACES) - 1) / 2) * _HEIGHT for place in range(len(rows))]
        ratios = [ratio(row, name) or 0.0 for row in rows]
        axes.barh(places, ratios, height=_HEIGHT, color=colour, label=name)
    axes.axvline(1.0, color="#666666", linewidth=0.8)
    cases = [row["case"] for row in rows]
    axes.set_yticks(
        range(len(rows)), [f"{case['model']}, {case['global_batch']} samples\n{case['machine']}" for case in cases]
    )
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="simulated samples/s over those of the best that people choose by hand")
    figure.legend(loc="outside upper center", ncols=len(SPACES))
    save(figure, path)
