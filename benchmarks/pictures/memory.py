"""Pictures of predicted and measured memory; they need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.measures.accuracy.memory import Case, count, predict
from benchmarks.measures.accuracy.peaks import TOO_HIGH, TOO_LOW
from benchmarks.measures.section import Row
from benchmarks.pictures import MB, save
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.memory import Change

SHOWN = Case(
    family="mingpt",
    modes="mix",
    world_size=8,
    micro_batch_size=8,
    optimizer="adamw",
    num_micro_batches=1,
    precision="32-true",
    backward_prefetch="pre",
    min_unit_bytes=65536,
    seed=0,
)
"""Case whose memory is drawn over a step: most memory of a training under AdamW is not its states."""
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#666666"
_Piece = tuple[str, str]


def draw_peaks(rows: dict[str, Sequence[Row]], path: Path) -> None:
    """Predicted against measured peaks of all cases, and their errors."""
    figure = Figure(figsize=(6.4, 7.2), layout="constrained")
    peaks, errors = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for (name, found), colour, marker in zip(rows.items(), (_BLUE, _ORANGE), "ox", strict=False):
        measured = [max(row["counted"].values()) / MB for row in found]
        predicted = [max(row["predicted"].values()) / MB for row in found]
        peaks.plot(measured, predicted, marker, color=colour, markersize=4, alpha=0.7, label=f"{name} ({len(found)})")
        errors.plot(measured, [100 * row["error"] for row in found], marker, color=colour, markersize=4, alpha=0.7)
    all_measured = [max(row["counted"].values()) / MB for found in rows.values() for row in found]
    ends = [min(all_measured) / 1.2, max(all_measured) * 1.2]
    peaks.plot(ends, ends, color=_GREY, linewidth=0.8)
    peaks.fill_between(ends, [x * (1 - TOO_HIGH) for x in ends], [x * (1 + TOO_HIGH) for x in ends], color="#DDDDDD")
    peaks.set(xscale="log", yscale="log", ylabel="predicted peak (MB)", title="Peak memory of one step")
    peaks.legend()
    for limit in (-100 * TOO_LOW, 100 * TOO_HIGH):
        errors.axhline(limit, color=_GREY, linestyle="--", linewidth=0.8)
    errors.set(xscale="log", xlabel="measured peak (MB)", ylabel="error (%)")
    save(figure, path)


def draw_step(path: Path) -> None:
    """Memory over one step of `SHOWN`: every change that is counted, and every moment that is predicted."""
    estimate, plan = predict(SHOWN)
    with fake_group(SHOWN.world_size):
        counted = count(SHOWN, plan, keeps_curve=True).curve
    predicted = [Change(moment.phase, moment.operator, round(moment.num_bytes)) for _, moment in estimate.moments]
    pieces = list(dict.fromkeys(_pieces(counted)))
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.plot(*_placed(counted, pieces), color=_ORANGE, linewidth=0.7, label="counted, after every change")
    axes.plot(*_placed(predicted, pieces), "v", color=_BLUE, markersize=3, label="predicted, largest of each moment")
    _name_phases(axes, [phase for phase, _ in pieces])
    axes.set(ylabel="live bytes of one rank (MB)", ylim=(0, None))
    axes.set_title(f"One step of {SHOWN.family} on rank 0 of {SHOWN.world_size}, ZDP and DP mixed")
    axes.legend(loc="lower center")
    save(figure, path)


def _pieces(points: Sequence[Change]) -> list[_Piece]:
    """Pieces that the curves have in common: operators in forward, reduce-scatters in backward."""
    pieces: list[_Piece] = []
    num_reduced = 0
    for point in points:
        if point.phase == "forward":
            # the loss is no operator: it is told from the last one in what is predicted only
            pieces.append((point.phase, point.operator) if point.operator or not pieces else pieces[-1])
        elif point.phase == "optimizer step":
            pieces.append((point.phase, ""))
        else:
            pieces.append(("backward", str(num_reduced)))
            num_reduced += point.phase == "reduce-scatter"
    return pieces


def _placed(points: Sequence[Change], pieces: Sequence[_Piece]) -> tuple[list[float], list[float]]:
    """Places for points that share no clock: every piece takes as much room, evenly divided."""
    x: list[float] = []
    for piece, group in groupby(_pieces(points)):
        num = len(list(group))
        x += [pieces.index(piece) + (index + 0.5) / num for index in range(num)]
    return x, [point.num_bytes / MB for point in points]


def _name_phases(axes: Axes, phases: Sequence[str]) -> None:
    """Names the phases below the axis, with a line between two."""
    ticks = {}
    for phase in dict.fromkeys(phases):
        first, num = phases.index(phase), phases.count(phase)
        ticks[phase] = first + num / 2
        axes.axvline(first, color=_GREY, linewidth=0.8, linestyle="--")
    axes.set_xticks(list(ticks.values()), list(ticks))
    axes.tick_params(axis="x", length=0)
