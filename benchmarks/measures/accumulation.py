"""Samples/s of OSDP's plans under gradient accumulation, over those of Lightning's own FSDP in the same memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

from rich.table import Table

from benchmarks.measures.section import Row, Section
from benchmarks.target import Target
from benchmarks.testbed.contest import UNLIMITED, Baseline, Entrant, build, on_one_rank
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.local import local_ranks
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.namespaces import Hosts, why_unavailable
from lightning_osdp.core.byte_size import format_bytes
from lightning_osdp.core.plan import Plan

_log = logging.getLogger(__name__)

LIMITS = (1.0, 1.15, None)
"""Factors of the counted peak of FULL_SHARD with the user's micro-batches; None: unlimited."""
TO_REACH = {1.0: 1.15, 1.15: 1.6, None: 2.9}
"""Limit -> samples/s over those of FULL_SHARD, with the user's micro-batches held, at `TO_REACH_MBIT`."""
TO_REACH_MBIT = 200.0
OF_BETTER = 0.97
"""Samples/s that OSDP has at least, of those of the better baseline that fits."""
BEYOND_LIMIT = 1.001
"""What a plan may be counted to take, of its limit: losses, of a few bytes, are not predicted."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Links of one rate, and whether the user's micro-batches are held or may be divided in another way."""

    model: str
    num_ranks: int
    rate_mbit: float | None
    is_auto: bool
    micro_batch_size: int
    num_micro_batches: int
    num_rounds: int


def section(name: str, cases: Sequence[Case], baselines: Sequence[Baseline]) -> Section:
    """Cases whose links can be had here.

    Args:
        name: of the section.
        cases: what to measure.
        baselines: with their counted peaks.
    """
    reason = why_unavailable() if any(case.rate_mbit is not None for case in cases) else None
    if reason is not None:
        _log.warning("Nothing is measured on shaped links: %s.", reason)
    return Section(
        name=name,
        cases=[case for case in cases if reason is None or case.rate_mbit is None],
        measure=partial(measure, baselines=baselines),
        table=table,
        targets=targets,
        misses=lambda _: [],
    )


def measure(case: Case, *, baselines: Sequence[Baseline]) -> dict[str, Any]:
    """Steps of all that take part, interleaved, one thread for each rank; then the peaks of OSDP's plans, counted.

    Ranks whose links are not shaped are plain processes.
    """
    own = [each for each in baselines if each.micro_batch_size == case.micro_batch_size]
    (full_shard,) = (each for each in own if each.sharding == "FULL_SHARD")
    arguments = {
        "model": case.model,
        "baselines": [asdict(each) for each in (baselines if case.is_auto else own)],
        "limits": [
            (limit, UNLIMITED if limit is None else round(limit * full_shard.counted_bytes)) for limit in LIMITS
        ],
        "micro_batch_size": case.micro_batch_size,
        "num_micro_batches": case.num_micro_batches,
        "is_auto": case.is_auto,
        "num_rounds": case.num_rounds,
    }
    if case.rate_mbit is None:
        found = local_ranks(case.num_ranks).run(on_one_rank, **arguments)
    else:
        with Hosts(case.num_ranks, rate_mbit=case.rate_mbit) as hosts:
            found = hosts.run("benchmarks.testbed.contest:on_one_rank", arguments, timeout_s=3600)
    entrants = [_summary(case.model, Entrant(**fields)) for fields in found[0]]
    return {"full_shard_bytes": full_shard.counted_bytes, "entrants": entrants}


def _summary(model: str, entrant: Entrant) -> dict[str, Any]:
    """What to keep of one: its plan as counts of modes, its peak counted."""
    plan = Plan.from_json(entrant.plan)
    modes = Counter(f"{mode} {unit.sync}" for unit in plan.units if unit.name for mode in unit.modes)
    counted_bytes = entrant.counted_bytes
    return {
        **asdict(entrant),
        "plan": ", ".join(f"{number} {mode}" for mode, number in sorted(modes.items())),
        "micro_batch_size": plan.micro_batch_size,
        "num_micro_batches": plan.num_micro_batches,
        "counted_bytes": _counted_bytes(model, entrant.plan) if counted_bytes is None else counted_bytes,
    }


@cache
def _counted_bytes(model: str, plan: str) -> int:
    made = Plan.from_json(plan)
    with fake_group(made.world_size):
        return count_step(build(model), made).peak_bytes


def table(rows: Sequence[Row]) -> Table:
    """One line for each that took part."""
    drawn = Table("links", "limit", "who", "b x K", "units", title="Gradient accumulation: samples/s over FULL_SHARD")
    for column in ("peak counted", "predicted", "step", "predicted", "over FULL_SHARD", "predicted", "bound"):
        drawn.add_column(column, justify="right")
    for row in rows:
        rate = row["case"]["rate_mbit"]
        for entrant in row["entrants"]:
            base = full_shard_of(row, entrant["limit"])
            bounds = bound_s(base, rate), bound_s(entrant, rate)
            drawn.add_row(
                "not shaped" if rate is None else f"{rate:g} Mbit/s",
                "none" if entrant["limit"] is None else f"{entrant['limit']:g}x",
                entrant["name"],
                f"{entrant['micro_batch_size']} x {entrant['num_micro_batches']}",
                entrant["plan"],
                format_bytes(entrant["counted_bytes"]),
                f"{entrant['predicted_bytes'] / entrant['counted_bytes'] - 1:+.2%}",
                f"{entrant['measured_s']:.2f} s",
                f"{entrant['predicted_s']:.2f} s",
                *(f"{base[which] / entrant[which]:.2f}x" for which in ("measured_s", "predicted_s")),
                f"{bounds[0] / bounds[1]:.2f}x",
            )
    return drawn


def bound_s(entrant: Row, rate_mbit: float | None) -> float:
    """Seconds that a step takes at least: its computing, as predicted, and its bytes at the rate of the links."""
    seconds_per_byte = 0.0 if rate_mbit is None else 8 / (rate_mbit * 1e6)
    seconds: float = entrant["compute_s"] + entrant["wire_bytes"] * seconds_per_byte
    return seconds


def full_shard_of(row: Row, limit: float | None) -> Row:
    """FULL_SHARD under the same limit; in every step all have the same samples."""
    found: Row = next(each for each in _within(row, limit) if each["name"] == "FULL_SHARD")
    return found


def targets(rows: Sequence[Row]) -> list[Target]:
    """Of shaped links: what to reach over FULL_SHARD and over the better baseline, and what not to take."""
    found = []
    for row in rows:
        case = row["case"]
        rate = case["rate_mbit"]
        for osdp in (each for each in row["entrants"] if each["name"] == "OSDP"):
            limit = osdp["limit"]
            division = "auto" if case["is_auto"] else "held"
            where = f"{rate:g} Mbit/s, {division}, {'unlimited' if limit is None else f'{limit:g}x'}" if rate else ""
            if limit is not None:
                over = osdp["counted_bytes"] / (limit * row["full_shard_bytes"])
                found.append(Target(name=f"{where or division}: bytes of the limit", limit=BEYOND_LIMIT, measured=over))
            if rate is None:
                continue
            if rate == TO_REACH_MBIT and not case["is_auto"]:
                ratio = full_shard_of(row, limit)["measured_s"] / osdp["measured_s"]
                found.append(
                    Target(name=f"{where}: over FULL_SHARD", limit=TO_REACH[limit], measured=ratio, is_least=True)
                )
            better_s = min(each["measured_s"] for each in _within(row, limit) if each["name"] != "OSDP")
            ratio = better_s / osdp["measured_s"]
            found.append(
                Target(name=f"{where}: over the better baseline", limit=OF_BETTER, measured=ratio, is_least=True)
            )
    return found


def _within(row: Row, limit: float | None) -> list[Row]:
    return [entrant for entrant in row["entrants"] if entrant["limit"] == limit]
