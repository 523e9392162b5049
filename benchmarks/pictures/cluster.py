"""Pictures of simulated machines: OSDP's samples/s over the best others', and memory over a step.

They need matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.measures.section import Row
from benchmarks.measures.simulated.nodes import SPACES, Case, Curve, ratio
from benchmarks.pictures import save

_COLOURS = ("#0072B2", "#D55E00")
_PLACES = 300
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


def _thinned(curve: Curve, longest_s: float) -> Curve:
    """Largest bytes of each of `_PLACES` equal parts of the longest step, at the part's first moment, and the end."""
    parts = groupby(curve, key=lambda point: int(point[0] / longest_s * _PLACES))
    found = [(points[0][0], max(each for _, each in points)) for _, part in parts if (points := [*part])]
    return [*found, curve[-1]]


def draw_memory(curves: Mapping[str, Curve], limit_bytes: int, case: Case, path: Path) -> None:
    """Memory of a step of a case over time, a panel for each name of the curves, with the limit."""
    figure = Figure(figsize=(9.0, 3.0), layout="constrained")
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    longest_s = max(curve[-1][0] for curve in curves.values())
    for axes, (name, curve) in zip(panels, curves.items(), strict=True):
        thinned = _thinned(curve, longest_s)
        seconds, num_bytes = [time_s for time_s, _ in thinned], [each / 2**30 for _, each in thinned]
        colour = _COLOURS[max(num_bytes) * 2**30 > limit_bytes]
        axes.fill_between(seconds, num_bytes, step="post", color=colour, alpha=0.6)
        axes.axhline(limit_bytes / 2**30, color="#666666", linewidth=0.8, linestyle="--")
        axes.set(title=f"{name}\n{seconds[-1]:.2f} s, {max(num_bytes):.1f} GiB", xlim=(0, longest_s), ylim=(0, None))
        axes.title.set_fontsize(9)
    panels[0].set(ylabel="live memory of one GPU (GiB)")
    figure.supxlabel(f"seconds of a step: {case}, simulated; dashed: the limit", fontsize=9)
    save(figure, path)
