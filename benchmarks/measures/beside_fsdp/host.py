"""Models that one device has no room for: samples/s of OSDP's plans over those of all on the host, and of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rich.table import Table

from benchmarks.measures.beside_fsdp.cases import Host
from benchmarks.measures.beside_fsdp.contest import OF_BEST_OTHER, PREDICTED
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.beside_fsdp.host import ON_HOST, UNFUSED, on_one_rank
from benchmarks.testbed.local import local_ranks
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds

OVER_FUSED, OVER_UNFUSED = 1.3, 2.0
"""Samples/s over those of all on the host, on the mean of all cells."""
OF_BOUND = 0.8
"""Samples/s over those of the closed form, at least."""
TOO_LOW, TOO_HIGH = 0.01, 0.02
"""Largest share by which peaks may be predicted too low, and too high."""
_OSDP = "OSDP"
_PEAKS = (
    ("device", "predicted_bytes", "counted_bytes"),
    ("host", "predicted_host_bytes", "counted_host_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps of so many tokens, on a device with a link of one rate; fields as of `on_one_rank`."""

    num_layers: int
    width: int
    tokens: int
    link_gb_s: float
    needs: tuple[float, ...]
    computes: bool
    num_rounds: int


def section(name: str, asked: Host, *, num_rounds: int) -> Section:
    """Section of all rates and tokens."""
    cases = [
        Case(
            num_layers=asked.num_layers,
            width=asked.width,
            tokens=tokens,
            link_gb_s=rate,
            needs=asked.needs,
            computes=asked.computes,
            num_rounds=num_rounds,
        )
        for rate in asked.rates_gb_s
        for tokens in asked.tokens
    ]
    return Section(name=name, cases=cases, measure=measure, table=table, targets=targets)


def measure(case: Case) -> dict[str, Any]:
    """Takes steps of all ways in turns."""
    found: dict[str, Any] = local_ranks(1).run(on_one_rank, **vars(case))[0]
    return found


def table(rows: Sequence[Row]) -> Table:
    """Draws one line for each way and size of the device."""
    is_emulated = not any(row["case"]["computes"] for row in rows)
    title = f"Steps on a device that is too small{', emulated' if is_emulated else ', computed by this machine'}"
    drawn = Table("link", "tokens", "needs", "who", "decisions", title=title)
    for column in ("device", "predicted", "host", "predicted", "step", "predicted", "of the bound", f"over {ON_HOST}"):
        drawn.add_column(column, justify="right")
    for row, entrant in _entrants(rows):
        base = _named(row, ON_HOST, entrant["need"])
        drawn.add_row(
            f"{row['case']['link_gb_s']:g} GB/s",
            str(row["case"]["tokens"]),
            f"{entrant['need']:g}x",
            entrant["name"],
            entrant["plan"],
            format_bytes(entrant["counted_bytes"]),
            _off(entrant["predicted_bytes"], entrant["counted_bytes"]),
            "" if entrant["counted_host_bytes"] is None else format_bytes(entrant["counted_host_bytes"]),
            _off(entrant["predicted_host_bytes"], entrant["counted_host_bytes"]),
            format_seconds(entrant["measured_s"]),
            _off(entrant["predicted_s"], entrant["measured_s"]),
            f"{_of_bound(row, entrant):.2f}",
            "" if base is None else f"{base['measured_s'] / entrant['measured_s']:.2f}x",
        )
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """Means over all on the host; then, of every other goal, the cell that is farthest from it."""
    cells = [(row, each) for row, each in _entrants(rows) if each["name"] == _OSDP]
    found = [
        Target(name=f"OSDP over {name}: mean", limit=limit, measured=mean(ratios), is_least=True)
        for name, limit in ((ON_HOST, OVER_FUSED), (UNFUSED, OVER_UNFUSED))
        if (ratios := [over for row, each in cells if (over := _over(row, each, {name})) is not None])
    ]
    num_needs = sum(len(row["case"]["needs"]) for row in rows)
    found.append(Target(name="devices that OSDP trains on", limit=num_needs, measured=len(cells), is_least=True))
    others = {each["name"] for _, each in _entrants(rows)} - {_OSDP}
    predicted = [(row, each) for row, each in _entrants(rows) if each["predicted_s"] is not None]
    for what, limit, of, among, is_least in (
        ("OSDP over the best other", OF_BEST_OTHER, lambda row, each: _over(row, each, others), cells, True),
        ("OSDP, of the bound", OF_BOUND, _of_bound, cells, True),
        ("predicted step off by", PREDICTED, _apart("predicted_s", "measured_s"), predicted, False),
        ("bytes of the device over those it has", 1.001, _of_device, cells, False),
        *(
            (f"peak of the {place} predicted too {which} by", limit, _apart(*pair, sign=1), cells, False)
            for place, predicted_as, counted_as in _PEAKS
            for which, limit, pair in (
                ("low", TOO_LOW, (counted_as, predicted_as)),
                ("high", TOO_HIGH, (predicted_as, counted_as)),
            )
        ),
    ):
        found += _farthest(what, limit, of, among, is_least=is_least)
    return found


def _farthest(
    what: str, limit: float, of: Callable[..., float | None], cells: Sequence[tuple[Row, Row]], *, is_least: bool
) -> Iterator[Target]:
    values = [(value, cell) for cell in cells if (value := of(*cell)) is not None]
    if values:
        value, (row, entrant) = (min if is_least else max)(values, key=lambda each: each[0])
        case = row["case"]
        where = f"{case['link_gb_s']:g} GB/s, {case['tokens']} tokens, {entrant['need']:g}x"
        who = "" if entrant["name"] == _OSDP else f", {entrant['name']}"
        yield Target(name=f"{what}, farthest at {where}{who}", limit=limit, measured=value, is_least=is_least)


def _entrants(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    return ((row, entrant) for row in rows for entrant in row["entrants"])


def _named(row: Row, name: str, need: float) -> Row | None:
    return next((each for each in row["entrants"] if (each["name"], each["need"]) == (name, need)), None)


def _over(row: Row, entrant: Row, names: set[str]) -> float | None:
    """Samples/s over those of the best of these that fit the same device; None where none does."""
    others = (_named(row, name, entrant["need"]) for name in names)
    return min((each["measured_s"] / entrant["measured_s"] for each in others if each is not None), default=None)


def _of_bound(row: Row, entrant: Row) -> float:
    bound_s: float = row["bounds_s"][row["case"]["needs"].index(entrant["need"])]
    return bound_s / float(entrant["measured_s"])


def _of_device(row: Row, entrant: Row) -> float:
    share: float = entrant["counted_bytes"] * entrant["need"] / row["base_bytes"]
    return share


def _apart(one: str, other: str, sign: int | None = None) -> Callable[[Row, Row], float | None]:
    """Share by which one value is beyond another; without a sign, in either direction."""

    def of(_: Row, entrant: Row) -> float | None:
        if not entrant[other]:
            return None
        share: float = entrant[one] / entrant[other] - 1
        return abs(share) if sign is None else share

    return of


def _off(predicted: float | None, found: float | None) -> str:
    return "" if predicted is None or not found else f"{predicted / found - 1:+.1%}"
