"""Pictures of simulated machines: OSDP's samples/s over the best others'; they need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measures.section import Row
from benchmarks.measures.simulated.nodes import SPACES, ratio
from benchmarks.measures.simulated.tables import OSDP, over_best, where
from benchmarks.pictures import save

_COLOURS = ("#0072B2", "#D55E00", "#009E73")
_HEIGHT = 0.26
"""Of a bar; cases are 1 apart."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Three bars for each case; none of who does not fit, and none at all where no FSDP does."""
    labels = ["\n".join((f"{layers}, {limit}", machine)) for machine, layers, limit in map(where, rows)]
    bars = {name: [over_best(row, name) or 0.0 for row in rows] for name in OSDP}
    _draw(labels, bars, "simulated samples/s over those of the best FSDP that may do no more", path)


def draw_nodes(rows: Sequence[Row], path: Path) -> None:
    """Two bars for each case in which something that people choose by hand fits."""
    rows = [row for row in rows if ratio(row, "OSDP") is not None]
    labels = [
        f"{row['case']['model']}, {row['case']['global_batch']} samples\n{row['case']['machine']}" for row in rows
    ]
    bars = {name: [ratio(row, name) or 0.0 for row in rows] for name in SPACES}
    _draw(labels, bars, "simulated samples/s over those of the best that people choose by hand", path)


def _draw(labels: Sequence[str], bars: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    figure = Figure(figsize=(9.0, 1.2 + 0.5 * len(labels)), layout="constrained")
    axes = figure.subplots()
    for number, ((name, ratios), colour) in enumerate(zip(bars.items(), _COLOURS, strict=False)):
        places = [place + (number - (len(bars) - 1) / 2) * _HEIGHT for place in range(len(labels))]
        axes.barh(places, ratios, height=_HEIGHT, color=colour, label=name)
    axes.axvline(1.0, color="#666666", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.set(xlabel=title)
    figure.legend(loc="outside upper center", ncols=len(bars))
    save(figure, path)
