"""Samples/s of OSDP's plans over those of ``fully_shard`` and Lightning's strategies in the same memory, in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

from rich.table import Table

from benchmarks.families import build
from benchmarks.measures.accuracy.fits import MARGIN
from benchmarks.measures.beside_fsdp.baselines import BASE
from benchmarks.measures.links import on_links_that_can_be_had, on_ranks, rate_of
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.beside_fsdp.contest import UNLIMITED, Division, Entrant
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Baseline
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.limit import lives_under
from benchmarks.testbed.memory import count_step
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes

BEYOND_LIMIT = 1.001
"""What a plan may be counted to take, of its limit: losses, of a few bytes, are not predicted."""

Spaces = Mapping[str, Mapping[str, Any]]
"""Fields of the search space of each of OSDP's plans, by name: ``OSDP``, which has everything, is one of them."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on links of one rate, under several limits."""

    model: str
    num_ranks: int
    rate_mbit: float | None
    """10^6 bit/s; None: not shaped."""
    division: Division
    limits: tuple[float | None, ...]
    """Factors of the counted peak of `BASE` with these micro-batches; None: unlimited."""
    micro_batch_size: int
    num_micro_batches: int
    num_rounds: int
    node_size: int | None = None
    """Ranks of a node, which share a link; None: each has its own."""
    is_limited: bool = False
    """Whether OSDP's plan for the first limit has to live in a process that cannot take more."""


def section(
    name: str,
    cases: Sequence[Case],
    baselines: Mapping[str, Sequence[Baseline]],
    *,
    spaces: Spaces,
    targets: Callable[[Sequence[Row]], list[Target]],
) -> Section:
    """Cases whose links can be had here."""
    return Section(
        name=name,
        cases=on_links_that_can_be_had(cases),
        measure=partial(measure, baselines=baselines, spaces=spaces),
        table=table,
        targets=targets,
    )


def measure(case: Case, *, baselines: Mapping[str, Sequence[Baseline]], spaces: Spaces) -> dict[str, Any]:
    """Steps of all that take part, in turns; then the peaks of OSDP's plans, counted."""
    sizes = (case.micro_batch_size, case.num_micro_batches)
    known = [each for each in baselines[case.model] if _may_take_part(each, case)]
    (base,) = (
        each
        for each in baselines[case.model]
        if each.way == BASE and (each.micro_batch_size, each.num_micro_batches) == sizes
    )
    found = on_ranks(
        case.num_ranks,
        case.rate_mbit,
        "benchmarks.testbed.beside_fsdp.contest:on_one_rank",
        model=case.model,
        baselines=[asdict(each) for each in known],
        limits=[(limit, UNLIMITED if limit is None else round(limit * base.counted_bytes)) for limit in case.limits],
        spaces=spaces,
        micro_batch_size=case.micro_batch_size,
        num_micro_batches=case.num_micro_batches,
        division=case.division,
        num_rounds=case.num_rounds,
        node_size=case.node_size,
        ranks_per_host=case.node_size or 1,
    )
    entrants = [Entrant(**fields) for fields in found]
    row: Row = {
        "base_bytes": base.counted_bytes,
        "entrants": [_summary(case.model, entrant) for entrant in entrants],
    }
    if case.is_limited:
        (osdp,) = (each for each in entrants if each.name == "OSDP" and each.limit == case.limits[0])
        row["hard"] = _under_hard_limits(case, osdp, base.counted_bytes)
    return row


def _under_hard_limits(case: Case, entrant: Entrant, base_bytes: int) -> dict[str, bool]:
    """Whether training lives a little above its limit, and a little below its peak."""
    assert entrant.limit is not None
    assert entrant.predicted_bytes is not None
    plan = Plan.from_json(entrant.plan)
    above = round(entrant.limit * base_bytes * (1 + MARGIN))
    below = round(entrant.predicted_bytes * (1 - MARGIN))
    return {
        "lives above the limit": lives_under(above, case.model, plan).lived,
        "lives below the peak": lives_under(below, case.model, plan).lived,
    }


def _may_take_part(baseline: Baseline, case: Case) -> bool:
    sizes = (case.micro_batch_size, case.num_micro_batches)
    if case.division == "held":
        return (baseline.micro_batch_size, baseline.num_micro_batches) == sizes
    if case.division == "auto":
        return baseline.micro_batch_size * baseline.num_micro_batches == sizes[0] * sizes[1]
    return baseline.num_micro_batches == 1


def _summary(model: str, entrant: Entrant) -> Row:
    """What to keep of one: its plan as counts of modes, its peak counted."""
    plan = Plan.from_json(entrant.plan)
    modes = Counter(f"{mode} {unit.sync}" for unit in plan.units if unit.name for mode in unit.modes)
    parts = [f"{number} {mode}" for mode, number in sorted(modes.items())]
    if plan.blocks:
        parts.append(f"{len(plan.blocks)} blocks recompute")
    known_bytes = entrant.counted_bytes
    return {
        "name": entrant.name,
        "limit": entrant.limit,
        "plan": ", ".join(parts),
        "parameter_bytes": sum(unit.parameter_bytes for unit in plan.units),
        "strip": strip(plan),
        "micro_batch_size": plan.micro_batch_size,
        "num_micro_batches": plan.num_micro_batches,
        "counted_bytes": counted_bytes(model, entrant.plan) if known_bytes is None else known_bytes,
        "predicted_bytes": entrant.predicted_bytes,
        "predicted_s": entrant.predicted_s,
        "measured_s": entrant.measured_s,
        "compute_s": entrant.compute_s,
        "wire_bytes": entrant.wire_bytes,
        "sent_bytes": entrant.sent_bytes,
    }


def strip(plan: Plan) -> list[list[Any]]:
    """For a picture: of each unit but the root bytes, modes of its slices, micro-batches that reduce, activations."""
    inside = {block.name: block.activations for block in plan.blocks}
    return [
        [
            unit.parameter_bytes,
            list(unit.modes),
            unit.sync,
            next((how for name, how in inside.items() if f"{unit.name}.".startswith(f"{name}.")), "keep"),
        ]
        for unit in plan.units
        if unit.name
    ]


@cache
def counted_bytes(model: str, plan: str) -> int:
    """Peak of a step of OSDP's plan, as JSON, in one process as rank 0 of its ranks."""
    made = Plan.from_json(plan)
    with fake_group(made.world_size):
        return count_step(build(model), made).peak_bytes


def table(rows: Sequence[Row]) -> Table:
    """One line for each that took part."""
    drawn = Table("model", "links", "limit", "who", "b x K", "units", title=f"Samples/s over {BASE.name}")
    for column in (
        "peak counted",
        "predicted",
        "step",
        "predicted",
        "ratio",
        "predicted",
        "bound",
        "sent",
        "predicted",
    ):
        drawn.add_column(column, justify="right")
    for row in rows:
        for entrant in row["entrants"]:
            drawn.add_row(
                row["case"]["model"],
                rate_of(row),
                "none" if entrant["limit"] is None else f"{entrant['limit']:g}x",
                entrant["name"],
                f"{entrant['micro_batch_size']} x {entrant['num_micro_batches']}",
                entrant["plan"],
                format_bytes(entrant["counted_bytes"]),
                _percent(entrant["predicted_bytes"], entrant["counted_bytes"]),
                f"{entrant['measured_s']:.2f} s",
                "" if entrant["predicted_s"] is None else f"{entrant['predicted_s']:.2f} s",
                *(_times(ratio(row, entrant, of)) for of in ("measured_s", "predicted_s")),
                _times(bound(row, entrant)),
                format_bytes(entrant["sent_bytes"]) if entrant.get("sent_bytes") else "",
                _percent(entrant["wire_bytes"], entrant["sent_bytes"]) if entrant.get("sent_bytes") else "",
            )
    return drawn


def ratio(row: Row, entrant: Row, of: str = "measured_s", over: str = BASE.name) -> float | None:
    """Samples/s over those of another under the same limit; None where one of them has none.

    Args:
        row: in which both are.
        entrant: one of the row.
        of: ``measured_s`` or ``predicted_s``.
        over: name of the other.
    """
    other = named(row, over, entrant["limit"])
    if other is None or other[of] is None or entrant[of] is None:
        return None
    found: float = (num_samples(entrant) / entrant[of]) / (num_samples(other) / other[of])
    return found


def bound(row: Row, entrant: Row) -> float | None:
    """Ratio to `BASE` if steps took their computing, and their bytes at the rate of the links, and nothing else."""
    other = named(row, BASE.name, entrant["limit"])
    if other is None:
        return None
    rate = row["case"]["rate_mbit"]
    return (num_samples(entrant) / bound_s(entrant, rate)) / (num_samples(other) / bound_s(other, rate))


def bound_s(entrant: Row, rate_mbit: float | None) -> float:
    """Seconds that a step takes at least: its computing, as predicted, and its bytes at the rate of the links."""
    seconds_per_byte = 0.0 if rate_mbit is None else 8 / (rate_mbit * 1e6)
    seconds: float = entrant["compute_s"] + entrant["wire_bytes"] * seconds_per_byte
    return seconds


def num_samples(entrant: Row) -> int:
    """Of a rank and step."""
    number: int = entrant["micro_batch_size"] * entrant["num_micro_batches"]
    return number


def within(row: Row, limit: float | None) -> list[Row]:
    """Those that took part under a limit."""
    return [entrant for entrant in row["entrants"] if entrant["limit"] == limit]


def named(row: Row, name: str, limit: float | None) -> Row | None:
    """One that took part under a limit; None where it does not fit."""
    return next((each for each in within(row, limit) if each["name"] == name), None)


def over_limit(row: Row, entrant: Row) -> float:
    """What was counted of an entrant over what its limit allows; it has one."""
    found: float = entrant["counted_bytes"] / (entrant["limit"] * row["base_bytes"])
    return found


def of_best_other(row: Row, entrant: Row) -> float:
    """Samples/s over those of the best that is not OSDP under the same limit."""
    others = [each for each in within(row, entrant["limit"]) if not each["name"].startswith("OSDP")]
    return max_rate([entrant]) / max_rate(others)


def max_rate(entrants: Sequence[Row]) -> float:
    """Samples/s of a rank, of the best."""
    rates: list[float] = [num_samples(each) / each["measured_s"] for each in entrants]
    return max(rates)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _percent(predicted: float | None, found: float) -> str:
    return "" if predicted is None else f"{predicted / found - 1:+.2%}"
