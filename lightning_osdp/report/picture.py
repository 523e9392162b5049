"""A plan as a picture, which matplotlib draws: its units by mode, above the memory of a step against the limit.

One colour means one thing, and light ones lie beside dark ones; units in which blocks recompute or offload are hatched.
Whoever points at a unit in a browser reads what the plan says of it.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from lightning_osdp.core.axes import DP, HDP, HPZ, HSDP, NODE_STATIONARY, REPLICATED, RESIDENT, STATIONARY, ZDP
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.core.text.names import is_inside
from lightning_osdp.planner.engine import Moment
from lightning_osdp.report.sentences import explain, is_predicted, name_treatment, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = {
    "root": ("#F0E442", "root: always gathered"),
    ZDP.name: ("#BFD7EA", "ZDP: freed, gathered again"),
    DP.name: ("#0072B2", "DP: gathered once, kept"),
    RESIDENT.name: ("#E76F51", "resident: frozen, gathered once in a fit"),
    HPZ.name: ("#7FB2D6", "hpZ: freed, gathered again in nodes"),
    HSDP.name: ("#C3E6CB", "HSDP: in the node, freed, gathered again"),
    HDP.name: ("#2E8B57", "HDP: in the node, gathered once, kept"),
    REPLICATED.name: ("#C77C11", "replicated: trained, all of it on each rank"),
    STATIONARY.name: ("#8E6BBF", "stationary: never gathered, activations move"),
    NODE_STATIONARY.name: ("#C4B2E0", "node_stationary: likewise, in nodes"),
}
"""Colour and words of units."""
HATCHES = {
    "recompute": ("////", "blocks in it recompute"),
    "selective": ("//--", "blocks in it recompute in part"),
    "offload": ("\\\\\\\\", "blocks in it offload"),
}
"""Lines across units, and words; both lines where blocks recompute and offload their inputs.

Matplotlib writes 1,600 lines of SVG for dots, and a few for lines.
"""
STATES = ("parameter shards", "optimizer state", "buffers", "workspaces of libraries", "batch")
GRADIENTS = ("reduced gradients", "accumulated gradients", "unsharded gradients")
BANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "shards, optimizer state, buffers, batch": ("#999999", STATES),
    "gathered parameters": ("#009E73", ("gathered parameters",)),
    "gradients": ("#E69F00", GRADIENTS),
    "activations": ("#CC79A7", ("activations", "copies in flight")),
    "workspace": ("#4D2C19", ("workspace",)),
}
"""Memory from below: colour, and the parts of a `Moment`."""
LIMIT_COLOUR = "#B34700"
FAR = 1.8
"""A limit so many times the peak or more is told in words: drawn to scale it would squeeze the rest."""
MOST_MOMENTS = 600
"""Moments up to which each is drawn: more are not told apart, and of each few neighbours the largest is drawn."""
MOST_OUTLINED = 150
"""Units up to which each is outlined: of more, the outlines would be all that one sees."""
NAMED_SHARE = 0.013
"""Share of all parameters from which a unit's name finds room below it."""
NAME_CHARACTERS = 30
LINE_CHARACTERS = 150
_TOLD = ("batch", "step time", "samples/s", "gain", "activations")
"""Sentences of the table's summary that stand above the picture."""

_STYLE: dict[Any, Any] = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "none",  # words stay words
    "svg.hashsalt": "lightning-osdp",
    "text.parse_math": False,  # names may hold dollars
}
_HEADROOM = 1.2
_LEGEND: dict[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "alignment": "left",
    "columnspacing": 1.2,
    "frameon": False,
    "handlelength": 1.5,
}


def draw_plan(plan: Plan, *, memory: Sequence[Moment] = ()) -> Figure:
    """The picture of a plan; it needs matplotlib.

    Args:
        plan: what to draw.
        memory: what is predicted to live at each moment of a step, see `StepEstimate`; without it the plan's peak
            is told in words.
    """
    from matplotlib.figure import Figure

    inches = [0.9, 3.2] if memory else [0.9]
    words = "\n".join(textwrap.fill(line, LINE_CHARACTERS) for line in (_title(plan), *_told(plan)))
    with _styled():
        figure = Figure(figsize=(11, 2 + 0.2 * words.count("\n") + sum(inches)), layout="constrained")
        figure.suptitle(words, x=0.005, ha="left", fontsize=9.5)
        units, *below = figure.subplots(len(inches), 1, squeeze=False, height_ratios=inches)[:, 0]
        _draw_units(units, plan)
        if memory:
            _draw_step(below[0], plan, _thinned(memory))
        else:
            units.set_xlabel(f"peak memory: {dict(summarise(plan))['peak memory']}", loc="left")
    return figure


def save_picture(plan: Plan, path: str | Path, *, memory: Sequence[Moment]) -> None:
    """Writes the picture of a plan to an SVG file, the same each time; the arguments are those of `draw_plan`."""
    drawn = io.StringIO()
    metadata = {"Title": _title(plan), "Description": "\n".join(_told(plan)), "Creator": None, "Date": None}
    figure = draw_plan(plan, memory=memory)
    with _styled():
        figure.savefig(drawn, format="svg", metadata=metadata)
    tooltips = [f"<title>{escape(_tooltip(unit, plan))}</title>" for unit in _units(plan)]
    svg = re.sub(r'<g id="unit(\d+)-\d+">', lambda group: group[0] + tooltips[int(group[1])], drawn.getvalue())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg, encoding="utf-8")


@contextmanager
def _styled() -> Iterator[None]:
    """Within it, matplotlib draws the same, on a white page, whatever its user has set."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the font that it is shown in may have it
        yield


def _title(plan: Plan) -> str:
    counts = Counter(" + ".join(dict.fromkeys(unit.modes)) for unit in plan.units if unit.name)
    modes = ", ".join(f"{count} {'unit' if count == 1 else 'units'} {mode}" for mode, count in sorted(counts.items()))
    return f"OSDP plan: {modes or 'one unit'}"


def _told(plan: Plan) -> list[str]:
    return [f"{label}: {sentence}" for label, sentence in summarise(plan) if label in _TOLD]


def _units(plan: Plan) -> list[Unit]:
    """Units that are drawn: those with parameters, or all of a plan that was written by hand and holds no sizes."""
    return [unit for unit in plan.units if unit.parameter_bytes > 0] or list(plan.units)


def _draw_units(axes: Axes, plan: Plan) -> None:
    """Draws a box for each unit, divided into its slices, one above the other, where they differ."""
    from matplotlib.patches import Patch

    units, total = _units(plan), sum(unit.parameter_bytes for unit in plan.units)
    widths = [unit.parameter_bytes / total if total else 1 / len(units) for unit in units]
    lefts = [0.0, *accumulate(widths)]
    line = 0.5 if len(units) <= MOST_OUTLINED else 0.0
    for i, unit in enumerate(units):
        top, hatch = 1.0, "".join(HATCHES[choice][0] for choice in _choices(unit, plan))
        for j, (mode, count) in enumerate(sorted(Counter(unit.modes).items())):
            colour, height = KINDS[mode if unit.name else "root"][0], count / unit.num_slices
            top -= height
            (box,) = axes.bar(lefts[i], height, widths[i], top, align="edge", hatch=hatch, gid=f"unit{i}-{j}")
            box.set(facecolor=colour, edgecolor="black", linewidth=line)
    named = [i for i, width in enumerate(widths) if width >= NAMED_SHARE]
    axes.set_xticks(
        [lefts[i] + widths[i] / 2 for i in named], [_short(units[i].name or "(root)") for i in named], rotation=90
    )
    axes.set(xlim=(0, 1), ylim=(0, 1), yticks=[])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    used = {"root", ZDP.name, DP.name, *(mode for unit in units for mode in unit.modes)}
    handles = [Patch(facecolor=colour, label=words) for kind, (colour, words) in KINDS.items() if kind in used]
    chosen = {choice for unit in units for choice in _choices(unit, plan)}
    for lines, words in (HATCHES[choice] for choice in HATCHES if choice in chosen):
        handles.append(Patch(facecolor="white", edgecolor="black", hatch=lines, label=words))
    heading = f"Units in forward order, as wide as they are large ({format_bytes(total)})"
    axes.legend(handles=handles, title=heading, ncols=len(handles), **_LEGEND)


def _choices(unit: Unit, plan: Plan) -> list[str]:
    """Choices of `HATCHES` that blocks inside the unit have."""
    inside = [
        block.activations
        for block in plan.blocks
        if any(is_inside(operator, [block.name]) for operator in unit.operators)
    ]
    return [choice for choice in HATCHES if any(choice in activations for activations in inside)]


def _tooltip(unit: Unit, plan: Plan) -> str:
    lines = [f"{unit.name or '(root)'}: {unit.kind}", name_treatment(unit), format_bytes(unit.parameter_bytes)]
    if is_predicted(plan):
        lines.append(f"{format_seconds(unit.time_s)} a step")
    lines += [HATCHES[choice][1] for choice in _choices(unit, plan)]
    return "\n".join([*lines, explain([unit], plan)])


def _short(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS else "…" + name[-NAME_CHARACTERS + 1 :]


def _draw_step(axes: Axes, plan: Plan, moments: Sequence[Moment]) -> None:
    """Bytes of one rank at each moment of a step, by what they are, under the limit."""
    peak = max(range(len(moments)), key=lambda i: moments[i].num_bytes)
    peak_bytes, limit_bytes = moments[peak].num_bytes, plan.memory_limit_bytes
    is_far = limit_bytes >= FAR * peak_bytes
    highest = max(1.0, peak_bytes) if is_far else max(peak_bytes, limit_bytes)
    scale = 1024.0 ** min(4, int(math.log(highest, 1024)))
    top = highest / scale
    _draw_bands(axes, plan, moments, scale)
    is_left = peak < len(moments) / 2
    here, there, edge = ("left", "right", 0.995) if is_left else ("right", "left", 0.005)
    arrow = {"arrowstyle": "-|>", "color": "black", "relpos": (0 if is_left else 1, 0), "shrinkB": 0}
    place = (peak + 0.5, peak_bytes / scale)
    axes.annotate(_peak(plan, moments[peak]), place, (place[0], 1.1 * top), ha=here, arrowprops=arrow)
    across = axes.get_yaxis_transform()
    limit = f"limit is {format_bytes(limit_bytes)}" + (", far above" if is_far else "")
    axes.text(edge, 1.02 * top, limit, ha=there, color=LIMIT_COLOUR, transform=across)
    if not is_far:
        axes.axhline(limit_bytes / scale, color=LIMIT_COLOUR, linewidth=2, linestyle="--")
    _name_phases(axes, moments)
    axes.set(xlim=(0, len(moments)), ylim=(0, _HEADROOM * top), ylabel=format_bytes(scale).split()[1])


def _draw_bands(axes: Axes, plan: Plan, moments: Sequence[Moment], scale: float) -> None:
    heights, bands = [0.0] * len(moments), []
    for number, (words, (colour, parts)) in enumerate(BANDS.items()):
        added = [sum(moment.parts.get(part, 0.0) for part in parts) / scale for moment in moments]
        heights = [below + more for below, more in zip(heights, added, strict=True)]
        if any(added):
            band = axes.stairs(heights, fill=True, label=words, facecolor=colour, edgecolor="black", linewidth=0.4)
            band.set_zorder(2 - number / 10)  # each reaches down to 0, and lower ones are drawn over it
            bands.append(band)
    part = "a step" if plan.num_micro_batches <= 3 else "the first, a steady and the last micro-batch"
    axes.legend(handles=bands, title=f"Memory of one rank over {part}, as predicted", ncols=len(bands), **_LEGEND)


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


def _name_phases(axes: Axes, moments: Sequence[Moment]) -> None:
    """Names of forward, backward and the optimizer step below what they take, with lines between them."""
    phases = [(name, len(list(group))) for name, group in groupby(moments, key=_phase)]
    ends = list(accumulate(length for _, length in phases))
    for end in ends[:-1]:
        axes.axvline(end, ymax=1 / _HEADROOM, color="black", linewidth=0.8, linestyle=":")
    middles = [end - length / 2 for end, (_, length) in zip(ends, phases, strict=True)]
    axes.set_xticks([*middles[:-1], ends[-1]], [name for name, _ in phases])
    axes.tick_params(axis="x", length=0)
    axes.get_xticklabels()[-1].set_horizontalalignment("right")  # short as it is, its name would leave the page
