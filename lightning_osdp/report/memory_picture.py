"""Memory against the limit: over the moments of a step where they are known, else as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.cost import Moment
from lightning_osdp.report.sentences import NOT_PREDICTED, is_predicted
from lightning_osdp.report.svg import Drawing, Fill

Area = tuple[float, float, float, float]
"""Left, top, width and height."""

BANDS: dict[str, tuple[Fill, tuple[str, ...]]] = {
    "shards, optimizer state, buffers, batch": (
        Fill("#BBBBBB"),
        ("parameter shards", "optimizer state", "buffers", "batch"),
    ),
    "gathered parameters": (Fill("#0072B2"), ("gathered parameters",)),
    "gradients": (Fill("#F0B84C"), ("reduced gradients", "accumulated gradients", "unsharded gradients")),
    "activations": (Fill("#009E73"), ("activations",)),
    "workspace": (Fill("#F5E6F0"), ("workspace",)),
}
"""From below: colour, and the parts of a `Moment`. Neighbours differ in lightness, too."""
LIMIT_COLOUR, LIMIT_WORDS_COLOUR = "#D55E00", "#A04500"
FAR = 1.8
"""A limit so many times the peak or more is told in words: drawn to scale it would squeeze the rest."""
MOST_MOMENTS = 600
"""More than these are not told apart on the page: of each few neighbours the largest is drawn."""
_HEADROOM = 1.2
_BAR_PX = 22.0


def draw_step(drawing: Drawing, area: Area, plan: Plan, moments: Sequence[Moment]) -> None:
    """Bytes of one rank at each moment of a step, by what they are, under the limit."""
    left, top, width, height = area
    part = "a step" if plan.num_micro_batches <= 3 else "the first, a steady and the last micro-batch"
    drawing.text(left, top - 12, f"Memory of one rank over {part}, as predicted")
    moments = _thinned(moments)
    peak = max(range(len(moments)), key=lambda i: moments[i].num_bytes)
    peak_bytes = moments[peak].num_bytes
    is_far = plan.memory_limit_bytes >= FAR * peak_bytes
    highest = peak_bytes if is_far else max(peak_bytes, plan.memory_limit_bytes)
    px_per_byte = height / highest / _HEADROOM
    bottom, step_px = top + height, width / len(moments)
    for value, label in _ticks(highest):
        y = bottom - value * px_per_byte
        drawing.line((left - 4, y), (left + width, y), colour="#DDDDDD")
        drawing.text(left - 7, y + 4, label, size=10, anchor="end")
    _draw_bands(drawing, (left, bottom), moments, step_px=step_px, px_per_byte=px_per_byte)
    y_limit = bottom - highest * px_per_byte
    _draw_phases(drawing, (left, y_limit, width, bottom - y_limit), moments, step_px)
    _draw_legend(drawing, left + width, top - 12)
    on_left = peak < len(moments) / 2
    x, y = left + (peak + 0.5) * step_px, bottom - peak_bytes * px_per_byte
    drawing.area([(x - 5, y - 8), (x + 5, y - 8), (x, y)], Fill("black"), outline=0)
    drawing.text(x, y_limit - 21, _peak(plan, moments[peak]), anchor="start" if on_left else "end")
    if not is_far:
        drawing.line((left, y_limit), (left + width, y_limit), colour=LIMIT_COLOUR, width=2, dashes="7 4")
    words = _limit(plan) + (", far above" if is_far else "")
    where = left + width - 4 if on_left else left + 4
    drawing.text(where, y_limit - 6, words, anchor="end" if on_left else "start", colour=LIMIT_WORDS_COLOUR)


def bars_height(plan: Plan) -> float:
    """Pixels that `draw_bars` takes."""
    return 0.0 if not is_predicted(plan) else 2.0 * _BAR_PX + 40


def draw_bars(drawing: Drawing, area: Area, plan: Plan) -> None:
    """The predicted peaks of the plan and of plain FSDP against the limit; the limit alone where nothing is known."""
    left, top, width, _ = area
    if not is_predicted(plan):
        drawing.text(left, top - 12, f"Memory of one rank: {NOT_PREDICTED}; the {_limit(plan)}")
        return
    drawing.text(left, top - 12, "Peak memory of one rank, as predicted")
    peaks = {"this plan": (plan.peak_bytes, Fill("#0072B2"))}
    if plan.all_zdp_peak_bytes:
        peaks["plain FSDP at its best"] = (
            plan.all_zdp_peak_bytes,
            Fill("#F0B84C", "lines"),
        )
    largest = max(1, *(num_bytes for num_bytes, _ in peaks.values()))
    is_far = plan.memory_limit_bytes >= FAR * largest
    highest = largest if is_far else max(largest, plan.memory_limit_bytes)
    names_px, values_px = 130.0, 60.0
    px_per_byte = (width - names_px - values_px) / highest
    y = top + 18.0
    for name, (num_bytes, fill) in peaks.items():
        drawing.text(left, y + _BAR_PX / 2 + 4, name)
        drawing.box(left + names_px, y, num_bytes * px_per_byte, _BAR_PX, fill)
        drawing.text(left + width, y + _BAR_PX / 2 + 4, format_bytes(num_bytes), anchor="end")
        y += _BAR_PX + 6
    if is_far:
        drawing.text(left + width, top + 10, f"{_limit(plan)}, far above", anchor="end", colour=LIMIT_WORDS_COLOUR)
    else:
        x = left + names_px + plan.memory_limit_bytes * px_per_byte
        drawing.line((x, top + 14), (x, y), colour=LIMIT_COLOUR, width=2, dashes="7 4")
        drawing.text(x, top + 10, _limit(plan), anchor="end", colour=LIMIT_WORDS_COLOUR)


def _limit(plan: Plan) -> str:
    return f"limit is {format_bytes(plan.memory_limit_bytes)}"


def _peak(plan: Plan, moment: Moment) -> str:
    share = f"{moment.num_bytes / plan.memory_limit_bytes:.1%} of the limit"
    phase = _phase(moment)
    where = phase if phase == "optimizer step" else f"{phase} of {moment.operator or 'the loss'}"
    return f"peak {format_bytes(moment.num_bytes)}, {share}, in the {where}"


def _thinned(moments: Sequence[Moment]) -> list[Moment]:
    each = math.ceil(len(moments) / MOST_MOMENTS)
    thinned = []
    for _, phase in groupby(moments, key=_phase):
        together = list(phase)
        groups = (together[i : i + each] for i in range(0, len(together), each))
        thinned += [max(group, key=lambda moment: moment.num_bytes) for group in groups]
    return thinned


def _phase(moment: Moment) -> str:
    return "backward" if moment.phase == "reduce-scatter" else moment.phase


def _ticks(highest: float) -> list[tuple[float, str]]:
    """Up to about six round numbers of bytes from 0, with their labels."""
    scale = 1024.0 ** max(0, int(math.log(max(highest, 1), 1024)))
    rough = highest / scale / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = scale * power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [(i * step, format_bytes(i * step)) for i in range(int(highest / step) + 1)]


def _draw_bands(
    drawing: Drawing,
    corner: tuple[float, float],
    moments: Sequence[Moment],
    *,
    step_px: float,
    px_per_byte: float,
) -> None:
    """Each moment as wide as any other: bands one above the other, drawn from the highest down."""
    left, bottom = corner
    heights = [0.0] * len(moments)
    outlines = []
    for fill, parts in BANDS.values():
        below = list(heights)
        heights = [
            height + sum(moment.parts.get(part, 0.0) for part in parts) * px_per_byte
            for height, moment in zip(heights, moments, strict=True)
        ]
        if heights == below:
            continue
        points = [(left, bottom)]
        for i, height in enumerate(heights):
            points += [(left + i * step_px, bottom - height), (left + (i + 1) * step_px, bottom - height)]
        outlines.append(([*points, (left + len(moments) * step_px, bottom)], fill))
    for points, fill in reversed(outlines):
        drawing.area(points, fill)


def _draw_phases(drawing: Drawing, area: Area, moments: Sequence[Moment], step_px: float) -> None:
    """Names of forward, backward and the optimizer step below what they take."""
    left, top, width, height = area
    start = 0
    for name, group in groupby(moments, key=_phase):
        end = start + len(list(group))
        if start:
            x = left + start * step_px
            drawing.line((x, top), (x, top + height + 4), colour="black", dashes="2 3")
        is_last = end == len(moments)
        x = left + width if is_last else left + (start + end) / 2 * step_px
        drawing.text(x, top + height + 18, name, anchor="end" if is_last else "middle")
        start = end


def _draw_legend(drawing: Drawing, right: float, baseline: float) -> None:
    x = right
    for words, (fill, _) in reversed(BANDS.items()):
        x -= 6.3 * len(words) + 18
        drawing.text(x + 18, baseline, words, size=11)
        drawing.box(x, baseline - 10, 13, 12, fill)
        x -= 10
