"""The picture of a soak: what each rank held over time; it needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measures.leaks import HELD, WARM_UP
from benchmarks.pictures import MB, save

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_LABELS = {"resident_bytes": "resident (MB)", "tensor_bytes": "tensors (MB)"}


def draw(ranks: Sequence[Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draws a curve for each rank and quantity."""
    figure = Figure(figsize=(8.0, 8.0), layout="constrained")
    for axes, quantity in zip(figure.subplots(len(HELD), 1, sharex=True), HELD, strict=True):
        scale = MB if quantity in _LABELS else 1
        for rank, columns in enumerate(ranks):
            minutes = [seconds / 60 for seconds in columns["seconds"]]
            values = [value / scale for value in columns[quantity]]
            axes.plot(minutes, values, color=_COLOURS[rank % len(_COLOURS)], linewidth=0.9, label=f"rank {rank}")
        axes.axvspan(0, WARM_UP * ranks[0]["seconds"][-1] / 60, color="#EEEEEE")
        axes.set(ylabel=_LABELS.get(quantity, quantity.removeprefix("num_").replace("_", " ")), ylim=(0, None))
    axes.set(xlabel="minutes of training; the grey ones are warm-up")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(ranks))
    save(figure, path)
