"""A predicted step above a real one; it needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.measures.traces import COMMUNICATION, TracedStep, typical
from benchmarks.pictures import save

_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "all-gather": "#D55E00",
    "reduce-scatter": "#E69F00",
    "runtime of units": "#999999",
    "optimizer step": "#009E73",
}


def draw(predicted: TracedStep, real: Sequence[TracedStep], path: Path) -> None:
    """Draws both steps on one axis of milliseconds, what computes above what communicates."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for each, title, step in zip(
        axes, ("predicted", "real, of median length"), (predicted, typical(real)), strict=True
    ):
        _draw_step(each, step)
        each.set_title(f"{title}: {1e3 * step.total_s:.0f} ms", loc="left", fontsize=9)
    axes[1].set_xlabel("ms from the start of the step")
    handles = [Patch(color=colour, label=part) for part, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8)
    save(figure, path)


def _draw_step(axes: Axes, step: TracedStep) -> None:
    for span in step.spans:
        row = int(span.part in COMMUNICATION)
        axes.broken_barh([(1e3 * span.start_s, 1e3 * span.length_s)], (row - 0.4, 0.8), color=_COLOURS[span.part])
    axes.set_yticks([0, 1], ["computing", "communicating"])
    axes.invert_yaxis()
