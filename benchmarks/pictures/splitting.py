"""Pictures of what splitting costs and saves; they need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measures.section import Row
from benchmarks.measures.splitting.peaks import MODES, NUM_SLICES, peak
from benchmarks.measures.splitting.step_time import of_mode, ratios
from benchmarks.pictures import MB, save

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000")
_MEASURED, _PREDICTED = "o-", "x--"


def draw_peaks(rows: Sequence[Row], path: Path) -> None:
    """Counted peaks by number of slices."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    for axes, mode in zip(figure.subplots(1, 2, sharey=True), MODES, strict=True):
        for hidden_size, colour in _coloured([row["case"]["hidden_size"] for row in rows]):
            case = {"hidden_size": hidden_size, "mode": mode}
            found = [row for row in rows if case.items() <= row["case"].items()]
            peaks = [peak(row) / MB for row in found]
            numbers = [row["case"]["num_slices"] for row in found]
            axes.plot(numbers, peaks, _MEASURED, color=colour, markersize=4, label=f"2 x {hidden_size}")
        axes.set(yscale="log")
    _save_by_mode(figure, path, "peak of a step (MB), counted")


def draw_times(rows: Sequence[Row], path: Path) -> None:
    """Step times over those of whole layers, by number of slices: measured where they were, and predicted."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    for axes, mode in zip(figure.subplots(1, 2, sharey=True), MODES, strict=True):
        for row, (hidden_size, colour) in zip(
            rows, _coloured([row["case"]["hidden_size"] for row in rows]), strict=True
        ):
            whole, *_ = plans = of_mode(row, mode)
            found = [ratios(plan, whole) for plan in plans]
            for name, style in (("measured", _MEASURED), ("predicted", _PREDICTED)):
                if name in found[0]:
                    label = f"2 x {hidden_size}, {name}"
                    seconds = [ratio[name] for ratio in found]
                    axes.plot(NUM_SLICES, seconds, style, color=colour, markersize=4, linewidth=1, label=label)
    _save_by_mode(figure, path, "step time / that of whole layers")


def draw_decisions(rows: Sequence[Row], path: Path) -> None:
    """Peak and step time of each decision, measured and predicted."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    bytes_axes, time_axes = figure.subplots(1, 2)
    plans = [plan for row in rows for plan in row["plans"]]
    for operators, colour in _coloured([plan["modes"].split()[0] for plan in plans]):
        found = [plan for plan in plans if plan["modes"].split()[0] == operators]
        numbers = range(len(found))
        counted = [plan["counted_bytes"] / MB for plan in found]
        bytes_axes.plot(numbers, counted, _MEASURED, color=colour, markersize=4, label=operators)
        for name, style in (("measured", _MEASURED), ("predicted", _PREDICTED)):
            seconds = [plan[f"{name}_s"] for plan in found]
            time_axes.plot(numbers, seconds, style, color=colour, markersize=4, label=f"{operators}, {name}")
    for axes, label in ((bytes_axes, "peak of a step (MB), counted"), (time_axes, "step time (s)")):
        axes.set(xlabel="ZDP slices of 4", ylabel=label)
    bytes_axes.legend()
    time_axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def _coloured(names: Sequence[object]) -> list[tuple[object, str]]:
    """Each name once, with its colour."""
    return list(zip(dict.fromkeys(names), _COLOURS, strict=False))


def _save_by_mode(figure: Figure, path: Path, label: str) -> None:
    """Names the axes of a figure with one picture for each mode, by number of slices."""
    for axes, mode in zip(figure.axes, MODES, strict=True):
        axes.set(xscale="log", xlabel="slices", title=f"all {mode}")
        axes.set_xticks(NUM_SLICES, [str(number) for number in NUM_SLICES], minor=False)
        axes.xaxis.minorticks_off()
    figure.axes[0].set(ylabel=label)
    figure.axes[1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)
