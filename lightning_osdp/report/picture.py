"""A plan as a picture: its units as a strip, marked by mode, above the memory of a step against the limit.

Modes are told apart by colour and by hatching; the colours are Okabe and Ito's, which colour-blind people can tell
apart. Whoever points at a unit in a browser reads what the plan says of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from lightning_osdp.core.plans.plan import DP, ZDP, Plan, Unit
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds, three_digits
from lightning_osdp.cost import Moment
from lightning_osdp.report.memory_picture import bars_height, draw_bars, draw_step
from lightning_osdp.report.sentences import NOT_PREDICTED, explain, is_predicted, name_treatment
from lightning_osdp.report.svg import Drawing, Fill

WIDTH_PX = 1100.0
LEFT_PX, RIGHT_PX = 70.0, 1080.0
STRIP_TOP_PX, STRIP_PX, MEMORY_PX = 88.0, 64.0, 240.0
MOST_OUTLINED = 150
"""Units up to which each is outlined: of more, the outlines would be all that one sees."""
NAME_PX = 13.0
"""Width of a unit from which its name finds room below it."""
NAME_CHARACTERS = 30
CHARACTER_PX = 5.2
"""Mean width of a character of size 10, rounded up: a program cannot know the font that a picture is shown in."""

FILLS = {ZDP.name: Fill("#F0B84C", "lines"), DP.name: Fill("#0072B2")}
ROOT_FILL = Fill("#BBBBBB", "dots")
OTHER_FILL = Fill("#CC79A7")


def draw_plan(plan: Plan, *, memory: Sequence[Moment] = ()) -> str:
    """The picture of a plan as SVG.

    Args:
        plan: what to draw.
        memory: what is predicted to live at each moment of a step, see `StepEstimate`; without it the plan's peak
            is drawn as a bar.
    """
    units = [unit for unit in plan.units if unit.parameter_bytes > 0]
    # a plan that was written by hand may hold no sizes
    widths = [float(unit.parameter_bytes) for unit in units] or [1.0] * len(plan.units)
    units = units or list(plan.units)
    scale = (RIGHT_PX - LEFT_PX) / sum(widths)
    lefts = [LEFT_PX, *(LEFT_PX + scale * width for width in accumulate(widths))]
    named = [i for i, width in enumerate(widths) if scale * width >= NAME_PX]
    names_px = CHARACTER_PX * max((len(_short(units[i])) for i in named), default=0)
    memory_top = STRIP_TOP_PX + STRIP_PX + names_px + 52
    memory_px = MEMORY_PX if memory else bars_height(plan)
    drawing = Drawing(WIDTH_PX, memory_top + memory_px + 40)
    _draw_title(drawing, plan)
    _draw_legend(drawing, plan)
    _draw_strip(drawing, plan, units, lefts)
    for i in named:
        middle = (lefts[i] + lefts[i + 1]) / 2
        drawing.text(middle + 3.5, STRIP_TOP_PX + STRIP_PX + 6, _short(units[i]), size=10, anchor="end", upwards=True)
    area = (LEFT_PX, memory_top, RIGHT_PX - LEFT_PX, memory_px)
    if memory:
        draw_step(drawing, area, plan, memory)
    else:
        draw_bars(drawing, area, plan)
    return drawing.to_text()


def save_picture(plan: Plan, path: str | Path, *, memory: Sequence[Moment] = ()) -> None:
    """Writes the picture of a plan to an SVG file; the arguments are those of `draw_plan`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw_plan(plan, memory=memory), encoding="utf-8")


def _draw_title(drawing: Drawing, plan: Plan) -> None:
    counts = Counter(" + ".join(dict.fromkeys(unit.modes)) for unit in plan.units if unit.name)
    modes = ", ".join(f"{count} {'unit' if count == 1 else 'units'} {mode}" for mode, count in sorted(counts.items()))
    samples = f"{plan.micro_batch_size} x {plan.num_micro_batches} x {plan.world_size}"
    lines = [f"{samples} samples (micro-batch x micro-batches x ranks) a step"]
    if is_predicted(plan):
        lines.append(f"{format_seconds(plan.step_time_s)} and {three_digits(plan.samples_per_s)} samples/s predicted")
        if plan.predicted_gain > 1:
            lines.append(f"{plan.predicted_gain - 1:.1%} more than plain FSDP at its best")
    else:
        lines.append(f"time and memory {NOT_PREDICTED}")
    drawing.text(LEFT_PX, 24, f"OSDP plan: {modes or 'one unit'}", size=16, bold=True)
    drawing.text(LEFT_PX, 44, "; ".join(lines), colour="#444444")


def _draw_legend(drawing: Drawing, plan: Plan) -> None:
    total = format_bytes(sum(unit.parameter_bytes for unit in plan.units))
    drawing.text(LEFT_PX, STRIP_TOP_PX - 10, f"Units in forward order, as wide as they are large ({total})")
    entries = [
        ("root: always gathered", ROOT_FILL),
        ("ZDP: freed, gathered again", FILLS[ZDP.name]),
        ("DP: gathered once, kept", FILLS[DP.name]),
    ]
    x = RIGHT_PX
    for words, fill in reversed(entries):
        x -= 6 * len(words) + 18
        drawing.text(x + 18, STRIP_TOP_PX - 10, words, size=11)
        drawing.box(x, STRIP_TOP_PX - 20, 13, 12, fill)
        x -= 14


def _draw_strip(drawing: Drawing, plan: Plan, units: Sequence[Unit], lefts: Sequence[float]) -> None:
    """One box for each unit; where its slices differ, one above the other."""
    outline = 0.5 if len(units) <= MOST_OUTLINED else 0
    for unit, left, right in zip(units, lefts, lefts[1:], strict=False):
        top = STRIP_TOP_PX
        for mode, count in sorted(Counter(unit.modes).items()):
            fill = FILLS.get(mode, OTHER_FILL) if unit.name else ROOT_FILL
            height = STRIP_PX * count / unit.num_slices
            drawing.box(left, top, right - left, height, fill, outline=outline, tooltip=_tooltip(unit, plan))
            top += height


def _tooltip(unit: Unit, plan: Plan) -> str:
    lines = [f"{unit.name or '(root)'}: {unit.kind}", name_treatment(unit), format_bytes(unit.parameter_bytes)]
    if is_predicted(plan):
        lines.append(f"{format_seconds(unit.time_s)} a step")
    return "\n".join([*lines, explain([unit], plan)])


def _short(unit: Unit) -> str:
    name = unit.name or "(root)"
    return name if len(name) <= NAME_CHARACTERS else "…" + name[-NAME_CHARACTERS + 1 :]
