"""The picture of predicted beside published numbers; it needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measures.section import Row
from benchmarks.measures.simulated.published import calibrated, predicted_gib
from benchmarks.pictures import save

_COLOURS = {
    "A": "#0072B2",
    "B": "#D55E00",
    "E": "#CC79A7",
    "F": "#009E73",
    "G7": "#E69F00",
    "G3": "#56B4E9",
    "I": "#000000",
    "S": "#994F00",
    "T": "#40B0A6",
}
"""Colours of points, by set."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Published against predicted: tokens/s after calibration, and memory."""
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for name, colour in _COLOURS.items():
        of_set = [row for row in rows if row["case"]["set"] == name]
        of_speed = [
            (row["case"]["tokens_per_s"], calibrated(rows, row))
            for row in of_set
            if row["case"]["tokens_per_s"] and not row["case"]["calibrates"]
        ]
        of_memory = [(row["case"]["gib"], predicted_gib(row)) for row in of_set if row["case"]["gib"]]
        for axes, pairs, label in ((speed, of_speed, name), (memory, of_memory, name if not of_speed else None)):
            if pairs:
                axes.scatter(*zip(*pairs, strict=True), color=colour, label=label)
    for axes, unit in ((speed, "tokens/s of one GPU"), (memory, "GiB of one GPU")):
        low, high = min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])
        axes.plot((low, high), (low, high), color="#666666", linewidth=0.8)
        axes.set(xlabel=f"published {unit}", ylabel=f"predicted {unit}")
    speed.set_xscale("log")
    speed.set_yscale("log")
    figure.legend(loc="outside upper center", ncols=len(_COLOURS))
    save(figure, path)
