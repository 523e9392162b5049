"""Pictures of the headline: throughput, memory used, and plans as strips of units; they need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.measures.beside_fsdp.baselines import BASE, FULL_SHARD, KEPT
from benchmarks.measures.beside_fsdp.contest import bound, over_limit, ratio, within
from benchmarks.measures.beside_fsdp.headline import CHECKPOINTING, MODELS
from benchmarks.measures.links import rate_of
from benchmarks.measures.section import Row
from benchmarks.pictures import save

COLOURS = {
    BASE.name: "#000000",
    CHECKPOINTING.name: "#777777",
    KEPT.name: "#56B4E9",
    FULL_SHARD.name: "#009E73",
    "OSDP, modes": "#F0E442",
    "OSDP, modes + splitting": "#E69F00",
    "OSDP, modes + splitting + accumulation": "#CC79A7",
    "OSDP": "#D55E00",
}
_MODES = {
    "DP": ("#0072B2", "kept gathered (DP)"),
    "ZDP": ("#BFD7EA", "sharded (ZDP)"),
    "hpZ": ("#56B4E9", "a shard in each node (hpZ)"),
    "HDP": ("#009E73", "kept gathered, replicated across nodes (HDP)"),
    "HSDP": ("#A6DBA0", "sharded in the node (HSDP)"),
}
_PARTLY = ("#7FA9CE", "modes by slice")


def draw(rows: Sequence[Row], folder: Path, name: str, colours: Mapping[str, str] = COLOURS) -> None:
    """``NAME.svg`` of all in these colours, and ``NAME_plans.svg``; nothing where nothing was measured."""
    if rows:
        draw_ratios(rows, folder / f"{name}.svg", colours)
        draw_plans(rows, folder / f"{name}_plans.svg")


def draw_ratios(rows: Sequence[Row], path: Path, colours: Mapping[str, str]) -> None:
    """Samples/s over fully_shard at its best, by model and limit, with bounds; and the memory that each used."""
    figure = Figure(figsize=(11, 3.2 * 2), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True)
    width = 0.88 / len(colours)
    cells = [(row, limit) for row in rows for limit in row["case"]["limits"]]
    for place, (row, limit) in enumerate(cells):
        for index, (name, colour) in enumerate(colours.items()):
            entrant = next((each for each in within(row, limit) if each["name"] == name), None)
            if entrant is None:
                continue
            x = place + (index - len(colours) / 2) * width
            speed.bar(x, ratio(row, entrant) or 0.0, width, color=colour)
            speed.plot(x, bound(row, entrant), "_", color="black", markersize=6)
            memory.bar(x, over_limit(row, entrant), width, color=colour)
    speed.axhline(1, color="black", linewidth=0.5)
    memory.axhline(1, color="black", linewidth=0.5)
    speed.set(ylabel="samples/s / fully_shard's")
    memory.set(ylabel="peak counted / limit", ylim=(0, 1.1))
    names = [f"{MODELS.get(row['case']['model'], '')}, {rate_of(row)}, {limit:g}x" for row, limit in cells]
    memory.set_xticks(range(len(cells)), [name.replace(", ", "\n").replace(" ", "\n", 1) for name in names], fontsize=7)
    patches: list[Any] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=4, fontsize=8)
    save(figure, path)


def draw_plans(rows: Sequence[Row], path: Path) -> None:
    """Every plan of OSDP with everything offered as a strip: its units in forward order, as wide as they are large."""
    found = [
        (f"{MODELS.get(row['case']['model'], '')}, {rate_of(row)}, {entrant['limit']:g}x", entrant)
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
    drawn = {_look(modes) for _, entrant in found for _, modes, *_ in entrant["strip"]}
    looks = [look for look in (*_MODES.values(), _PARTLY) if look in drawn]
    patches: list[Any] = [Patch(facecolor=colour, label=label) for colour, label in looks]
    patches += [
        Patch(facecolor="white", edgecolor="black", hatch="///", label="block recomputes"),
        Patch(facecolor="white", edgecolor="#D55E00", label="reduces last"),
    ]
    figure.legend(handles=patches, loc="outside upper center", ncols=5, fontsize=8)
    save(figure, path)


def _strip(axes: Axes, place: int, units: Sequence[Sequence[Any]]) -> None:
    total = sum(num_bytes for num_bytes, *_ in units)
    left = 0.0
    for num_bytes, modes, sync, activations in units:
        axes.barh(
            place,
            num_bytes / total,
            0.7,
            left=left,
            color=_look(modes)[0],
            edgecolor="#D55E00" if sync == "last" else "white",
            linewidth=0.6,
            hatch="" if activations == "keep" else "////",
        )
        left += num_bytes / total


def _look(modes: Sequence[str]) -> tuple[str, str]:
    """Colour and name of a unit whose slices are in these modes."""
    return _MODES[modes[0]] if len({*modes}) == 1 else _PARTLY
