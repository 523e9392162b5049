"""Pictures of a contest: throughput, memory used, and plans as strips of units; they need matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.measures.beside_fsdp.cases import Contest
from benchmarks.measures.beside_fsdp.contest import bound, named, over_limit, ratio
from benchmarks.measures.links import rate_of
from benchmarks.measures.section import Row
from benchmarks.pictures import save

_BASE = "#000000"
_COLOURS = ("#777777", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#CC79A7", "#A6DBA0", "#0072B2")
_OSDP = "#D55E00"
_MODES = {
    "DP": ("#0072B2", "kept gathered (DP)"),
    "ZDP": ("#BFD7EA", "sharded (ZDP)"),
    "hpZ": ("#56B4E9", "a shard in each node (hpZ)"),
    "HDP": ("#009E73", "kept gathered, replicated across nodes (HDP)"),
    "HSDP": ("#A6DBA0", "sharded in the node (HSDP)"),
}
_PARTLY = ("#7FA9CE", "modes by slice")


def draw(rows: Sequence[Row], contest: Contest, folder: Path, name: str) -> None:
    """``NAME.svg`` of all that the contest draws, and ``NAME_plans.svg``; nothing where nothing was measured."""
    if rows and contest.drawn:
        draw_ratios(rows, folder / f"{name}.svg", contest)
        draw_plans(rows, folder / f"{name}_plans.svg")


def draw_ratios(rows: Sequence[Row], path: Path, contest: Contest) -> None:
    """Ratios of samples/s by model and limit, with bounds; and the memory that each used."""
    present = {entrant["name"] for row in rows for entrant in row["entrants"]}
    palette = zip(contest.drawn, (_BASE, *_COLOURS), strict=False)
    colours = {name: _OSDP if name == "OSDP" else colour for name, colour in palette if name in present}
    figure = Figure(figsize=(11, 3.2 * 2), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True)
    width = 0.88 / len(colours)
    cells = [(row, limit) for row in rows for limit in row["case"]["limits"]]
    for index, name in enumerate(colours):
        found = [
            (place + (index - len(colours) / 2) * width, row, entrant)
            for place, (row, limit) in enumerate(cells)
            if (entrant := named(row, name, limit)) is not None
        ]
        places = [place for place, *_ in found]
        ratios = [ratio(row, entrant, contest.base) or 0.0 for _, row, entrant in found]
        speed.bar(places, ratios, width, color=colours[name])
        bounds = [bound(row, entrant, contest.base) for _, row, entrant in found]
        speed.plot(places, bounds, "_", color="black", markersize=6)  # None is left out
        used = [over_limit(row, entrant) for _, row, entrant in found]
        memory.bar(places, used, width, color=colours[name])
    speed.axhline(1, color="black", linewidth=0.5)
    memory.axhline(1, color="black", linewidth=0.5)
    speed.set(ylabel=f"samples/s / {contest.base}'s")
    memory.set(ylabel="peak counted / limit", ylim=(0, 1.1))
    names = [f"{row['case']['model']}\n{rate_of(row)}\n{limit:g}x" for row, limit in cells]
    memory.set_xticks(range(len(cells)), [name.replace(" Mbit", "\nMbit") for name in names], fontsize=6)
    patches: list[Any] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, fontsize=8)
    save(figure, path)


def draw_plans(rows: Sequence[Row], path: Path) -> None:
    """Every plan of OSDP with everything offered as a strip: its units in forward order, as wide as they are large."""
    found = [
        (f"{row['case']['model']}, {rate_of(row)}, {entrant['limit']:g}x", entrant)
        for row in rows
        for entrant in row["entrants"]
        if entrant["name"] == "OSDP"
    ]
    figure = Figure(figsize=(11, 0.7 + 0.32 * len(found)), layout="constrained")
    axes = figure.subplots()
    for place, (_, entrant) in enumerate(found):
        _strip(axes, place, entrant["strip"])
    labels = [f"{name}: b x K = {each['micro_batch_size']} x {each['num_micro_batches']}" for name, each in found]
    axes.set_yticks(range(len(found)), labels, fontsize=7)
    axes.set(xlabel="share of parameters, in forward order", xlim=(0, 1))
    axes.invert_yaxis()
    drawn = {_look(modes) for _, entrant in found for _, _, modes, *_ in entrant["strip"]}
    looks = [look for look in (*_MODES.values(), _PARTLY) if look in drawn]
    patches: list[Any] = [Patch(facecolor=colour, label=label) for colour, label in looks]
    patches += [
        Patch(facecolor="white", edgecolor="black", hatch="///", label="block recomputes"),
        Patch(facecolor="white", edgecolor=_OSDP, label="reduces last"),
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=5, fontsize=8)
    save(figure, path)


def _strip(axes: Axes, place: int, units: Sequence[Sequence[Any]]) -> None:
    total = sum(number * num_bytes for number, num_bytes, *_ in units)
    left = 0.0
    for number, num_bytes, modes, sync, activations in units:
        width = number * num_bytes / total
        axes.barh(
            place,
            width,
            0.7,
            left=left,
            color=_look(modes)[0],
            edgecolor=_OSDP if sync == "last" else "white",
            linewidth=0.6,
            hatch="" if activations == "keep" else "////",
        )
        left += width


def _look(modes: str) -> tuple[str, str]:
    """Colour and name of a unit whose slices are in these modes."""
    different = {*modes.split()}
    return _MODES[different.pop()] if len(different) == 1 else _PARTLY
