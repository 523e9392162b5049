"""Samples/s of OSDP's plans over those of ``fully_shard`` and Lightning's strategies in the same memory, in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import groupby
from statistics import mean, median
from typing import Any

from rich.table import Table

from benchmarks.families import build
from benchmarks.measures.beside_fsdp.baselines import Baselines, Ranks, counted_bytes
from benchmarks.measures.beside_fsdp.cases import BASE, Contest, Goal
from benchmarks.measures.links import on_links_that_can_be_had, on_ranks, rate_of
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.beside_fsdp.contest import UNLIMITED, Division, Entrant
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Baseline
from benchmarks.testbed.groups import counted_group
from benchmarks.testbed.memory import count_step
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes

BEYOND_LIMIT = 1.001
"""Share of its limit that a plan may be counted to take: losses, of a few bytes, are not predicted."""
OF_BEST_OTHER = 0.97
"""Samples/s that OSDP has at least, of those of the best other."""
PREDICTED = 0.1
"""Largest error of a predicted ratio."""
SENT = 0.05
"""Largest distance of the bytes that a node sends from the closed forms, headers included."""
RACE_COST = 0.02
"""Share of the first `_FIRST_STEPS` that a race may cost."""
_FIRST_STEPS = 200
_WORTH = 0.01
"""Fraction of a step that running nothing again must save for what is gained of it to be told."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on links of one rate, under several limits."""

    model: str
    num_ranks: int
    rate_mbit: float | None
    """Rate of the links in 10^6 bit/s; None: not shaped."""
    division: Division
    limits: tuple[float | None, ...]
    """Factors of the counted peak of `BASE` with these micro-batches; None: unlimited."""
    micro_batch_size: int
    num_micro_batches: int
    num_rounds: int
    node_size: int | None = None
    """Ranks of a node, which share a link; None: each has its own."""
    misjudged: tuple[float, float] | None = None
    """Factors that OSDP is wrong by before it races, see `Contest.misjudged`; None: no race."""


def section(name: str, contest: Contest, baselines: Baselines, *, num_rounds: int) -> Section:
    """Section of all cases whose links can be had here."""
    cases = [
        Case(
            model=model,
            num_ranks=contest.num_ranks,
            node_size=contest.node_size,
            rate_mbit=rate_mbit,
            division=contest.division,
            misjudged=contest.misjudged,
            limits=contest.limits,
            micro_batch_size=contest.micro_batch_size,
            num_micro_batches=contest.num_micro_batches,
            num_rounds=num_rounds,
        )
        for rate_mbit in contest.rates_mbit
        for model in contest.models
    ]
    return Section(
        name=name,
        cases=on_links_that_can_be_had(cases),
        measure=partial(measure, contest=contest, baselines=baselines),
        table=partial(table, contest=contest),
        targets=partial(targets, contest=contest),
    )


def measure(case: Case, *, contest: Contest, baselines: Baselines) -> dict[str, Any]:
    """Takes steps of all that take part, in turns; then counts the peaks of OSDP's plans."""
    ranks = Ranks(model=case.model, num_ranks=case.num_ranks, node_size=case.node_size)
    is_limited = any(limit is not None for limit in case.limits)
    base_bytes = counted_bytes(ranks, BASE, case.micro_batch_size, case.num_micro_batches) if is_limited else 0
    found = on_ranks(
        case.num_ranks,
        case.rate_mbit,
        "benchmarks.testbed.beside_fsdp.contest:on_one_rank",
        model=case.model,
        baselines=[
            asdict(each) for each in baselines[ranks] if each.way in contest.rivals and _may_take_part(each, case)
        ],
        limits=[(limit, UNLIMITED if limit is None else round(limit * base_bytes)) for limit in case.limits],
        spaces=contest.spaces,
        micro_batch_size=case.micro_batch_size,
        num_micro_batches=case.num_micro_batches,
        division=case.division,
        misjudged=case.misjudged,
        num_rounds=case.num_rounds,
        node_size=case.node_size,
        ranks_per_host=case.node_size or 1,
    )
    return {
        "base_bytes": base_bytes,
        "entrants": [_summary(case.model, Entrant(**fields)) for fields in found],
    }


def _may_take_part(baseline: Baseline, case: Case) -> bool:
    sizes = (case.micro_batch_size, case.num_micro_batches)
    if case.division == "held":
        return (baseline.micro_batch_size, baseline.num_micro_batches) == sizes
    if case.division == "auto":
        return baseline.micro_batch_size * baseline.num_micro_batches == sizes[0] * sizes[1]
    return baseline.num_micro_batches == 1


def _summary(model: str, entrant: Entrant) -> Row:
    """Keeps numbers, the plan as counts of modes, and of OSDP's plan its units for a picture."""
    plan = Plan.from_json(entrant.plan)
    modes = Counter(f"{mode} {unit.sync}" for unit in plan.units if unit.name for mode in unit.modes)
    parts = [f"{number} {mode}" for mode, number in sorted(modes.items())]
    if plan.blocks:
        in_part = sum(bool(block.kept) for block in plan.blocks)
        parts.append(f"{len(plan.blocks)} blocks recompute{f', {in_part} in part' if in_part else ''}")
    return {
        "name": entrant.name,
        "limit": entrant.limit,
        "plan": ", ".join(parts),
        "micro_batch_size": plan.micro_batch_size,
        "num_micro_batches": plan.num_micro_batches,
        "counted_bytes": entrant.counted_bytes or _counted_bytes(model, entrant.plan),
        "predicted_bytes": entrant.predicted_bytes,
        "predicted_s": entrant.predicted_s,
        "free_s": entrant.free_s,
        "measured_s": entrant.measured_s,
        "compute_s": entrant.compute_s,
        "wire_bytes": entrant.wire_bytes,
        "sent_bytes": entrant.sent_bytes,
        "cpu_s": entrant.cpu_s,
        **({"strip": strip(plan)} if entrant.name == "OSDP" else {}),
        **(
            {"race_steps": entrant.race_steps, "race_cost": entrant.race_cost, "is_open": entrant.is_open}
            if entrant.race_steps
            else {}
        ),
    }


def strip(plan: Plan) -> list[list[Any]]:
    """Units but the root: how many follow each other alike, bytes of one, modes of slices, sync, activations."""
    inside = {block.name: block.activations for block in plan.blocks}
    units = [
        [
            unit.parameter_bytes,
            " ".join(unit.modes),
            unit.sync,
            next((how for name, how in inside.items() if f"{unit.name}.".startswith(f"{name}.")), "keep"),
        ]
        for unit in plan.units
        if unit.name
    ]
    return [[len([*alike]), *unit] for unit, alike in groupby(units)]


@cache
def _counted_bytes(model: str, plan: str) -> int:
    """Peak of a step of OSDP's plan, as JSON, in one process as rank 0 of its ranks."""
    made = Plan.from_json(plan)
    with counted_group(made.world_size):
        return count_step(build(model), made).peak_bytes


def table(rows: Sequence[Row], *, contest: Contest) -> Table:
    """Draws one line for each that took part."""
    base = contest.base
    gains = {goal.who: goal.over for goal in contest.goals if goal.least_gain is not None}
    is_raced = contest.misjudged is not None
    drawn = Table("model", "links", "limit", "who", "b x K", "units", title=f"Samples/s over {base}")
    for column in (
        "peak counted",
        "predicted",
        "step",
        "predicted",
        "ratio",
        "predicted",
        "nothing again",
        *(("gained of that", "predicted") if gains else ()),
        "bound",
        "sent",
        "predicted",
        "CPU",
        *(("race",) if is_raced else ()),
    ):
        drawn.add_column(column, justify="right")
    for row in rows:
        for entrant in row["entrants"]:
            sent, wire = entrant.get("sent_bytes"), entrant.get("wire_bytes")
            drawn.add_row(
                row["case"]["model"],
                rate_of(row),
                "none" if entrant["limit"] is None else f"{entrant['limit']:g}x",
                entrant["name"],
                f"{entrant['micro_batch_size']} x {entrant['num_micro_batches']}",
                entrant["plan"],
                "" if entrant["counted_bytes"] is None else format_bytes(entrant["counted_bytes"]),
                _percent(entrant["predicted_bytes"], entrant["counted_bytes"]),
                f"{entrant['measured_s']:.2f} s",
                "" if entrant["predicted_s"] is None else f"{entrant['predicted_s']:.2f} s",
                *(_times(ratio(row, entrant, base, of)) for of in ("measured_s", "predicted_s")),
                _times(_ratio_if_free(row, entrant, base)),
                *(
                    _share(gain(row, entrant, gains[entrant["name"]], of)) if entrant["name"] in gains else ""
                    for of in (("measured_s", "predicted_s") if gains else ())
                ),
                _times(bound(row, entrant, base)),
                format_bytes(sent) if sent else "",
                _percent(wire, sent) if sent else "",
                f"{entrant['cpu_s']:.2f} s" if "cpu_s" in entrant else "",
                *((_race(entrant),) if is_raced else ()),
            )
    return drawn


def ratio(row: Row, entrant: Row, over: str, of: str = "measured_s") -> float | None:
    """Samples/s over those of another under the same limit; None where one of them has none.

    Args:
        row: in which both are.
        entrant: one of the row.
        over: name of the other.
        of: ``measured_s`` or ``predicted_s``.
    """
    other = named(row, over, entrant["limit"])
    if other is None or other[of] is None or entrant[of] is None:
        return None
    found: float = (num_samples(entrant) / entrant[of]) / (num_samples(other) / other[of])
    return found


def _ratio_if_free(row: Row, entrant: Row, over: str) -> float | None:
    """Predicted ratio to another if the entrant's forward ran again in no time."""
    predicted = ratio(row, entrant, over, "predicted_s")
    if predicted is None or entrant.get("free_s") is None:
        return None
    found: float = predicted * entrant["predicted_s"] / entrant["free_s"]
    return found


def gain(row: Row, entrant: Row, over: str, of: str = "measured_s") -> float | None:
    """Fraction of what another's steps would be shorter by, if they ran nothing again, by which the entrant's are.

    The saving of running nothing again is predicted. None where it would be less than 1%. Arguments are those of
    `ratio`.
    """
    found, other = ratio(row, entrant, over, of), named(row, over, entrant["limit"])
    if found is None or other is None or other.get("free_s") is None:
        return None
    most = 1 - other["free_s"] / other["predicted_s"]
    return (1 - 1 / found) / most if most >= _WORTH else None


def bound(row: Row, entrant: Row, over: str) -> float | None:
    """Ratio to another if steps took their computing, and their bytes at the rate of the links, and nothing else."""
    other = named(row, over, entrant["limit"])
    if other is None or "wire_bytes" not in entrant:
        return None
    rate = row["case"]["rate_mbit"]
    return (num_samples(entrant) / _bound_s(entrant, rate)) / (num_samples(other) / _bound_s(other, rate))


def _bound_s(entrant: Row, rate_mbit: float | None) -> float:
    """Seconds that a step takes at least: its computing, as predicted, and its bytes at the rate of the links."""
    seconds_per_byte = 0.0 if rate_mbit is None else 8 / (rate_mbit * 1e6)
    seconds: float = entrant["compute_s"] + entrant["wire_bytes"] * seconds_per_byte
    return seconds


def num_samples(entrant: Row) -> int:
    """Samples of a rank and step."""
    number: int = entrant["micro_batch_size"] * entrant["num_micro_batches"]
    return number


def named(row: Row, name: str, limit: float | None) -> Row | None:
    """Entrant under a limit; None where it does not fit."""
    found = (each for each in row["entrants"] if (each["name"], each["limit"]) == (name, limit))
    return next(found, None)


def over_limit(row: Row, entrant: Row) -> float:
    """Counted bytes of an entrant over those that its limit allows."""
    found: float = entrant["counted_bytes"] / (entrant["limit"] * row["base_bytes"])
    return found


def of_best_other(row: Row, entrant: Row) -> float | None:
    """Samples/s over those of the best that is not OSDP under the same limit; None where nobody else fits."""
    others = [
        ratio(row, entrant, each["name"])
        for each in row["entrants"]
        if each["limit"] == entrant["limit"] and not each["name"].startswith("OSDP")
    ]
    return min((each for each in others if each is not None), default=None)


def targets(rows: Sequence[Row], *, contest: Contest) -> list[Target]:
    """Goals of a contest; then what holds in every cell: memory, the best other, predictions, bytes sent."""
    found = [target for goal in contest.goals for target in _of_goal(rows, goal)]
    of_best = [
        over
        for row in rows
        for entrant in row["entrants"]
        if row["case"]["rate_mbit"] is not None and entrant["name"] == "OSDP"
        if (over := of_best_other(row, entrant)) is not None
    ]
    if of_best and contest.median is not None:
        name = "OSDP over the best other: median"
        found.append(Target(name=name, limit=contest.median, measured=median(of_best), is_least=True))
    for row in rows:
        where = f"{row['case']['model']}, {rate_of(row)}"
        found += _of_memory(row, where)
        if row["case"]["rate_mbit"] is not None:
            found += _of_speed(row, where, contest.base)
    return found


def _of_goal(rows: Sequence[Row], goal: Goal) -> Iterator[Target]:
    cells = [
        (row, entrant)
        for row in rows
        for entrant in row["entrants"]
        if entrant["name"] == goal.who
        and (goal.limits is None or entrant["limit"] in goal.limits)
        and (goal.at_mbit is None or row["case"]["rate_mbit"] == goal.at_mbit)
    ]
    ratios, gains = ([found for cell in cells if (found := of(*cell, goal.over)) is not None] for of in (ratio, gain))
    for what, limit, values, of in (
        ("mean", goal.mean, ratios, mean),
        ("best", goal.best, ratios, max),
        ("least", goal.least, ratios, min),
        ("least gain, of that of running nothing again", goal.least_gain, gains, min),
    ):
        if values and limit is not None:
            name = f"{goal.who} over {goal.over}{_under(goal.limits or ())}: {what}"
            yield Target(name=name, limit=limit, measured=of(values), is_least=True)


def _of_memory(row: Row, where: str) -> Iterator[Target]:
    limited = [each for each in row["entrants"] if each["limit"] is not None and each["name"].startswith("OSDP")]
    if limited:
        worst = max(limited, key=lambda each: over_limit(row, each))
        name = f"{where}{_under([worst['limit']])}, {worst['name']}: bytes of the limit"
        yield Target(name=name, limit=BEYOND_LIMIT, measured=over_limit(row, worst))


def _of_speed(row: Row, where: str, base: str) -> Iterator[Target]:
    off, sent = [], []
    for each in row["entrants"]:
        under = _under([each["limit"]])
        measured, predicted = (ratio(row, each, base, of) for of in ("measured_s", "predicted_s"))
        if measured is not None and predicted is not None:
            off.append((abs(predicted / measured - 1), f"{under}, {each['name']}"))
        if row["case"].get("node_size"):
            sent.append((abs(each["sent_bytes"] / each["wire_bytes"] - 1), f"{under}, {each['name']}"))
        if "race_cost" in each:
            name = f"{where}{under}: time that a race takes of {_FIRST_STEPS} steps"
            yield Target(name=name, limit=RACE_COST, measured=each["race_cost"] / _FIRST_STEPS)
        if each["name"] == "OSDP" and (of_best := of_best_other(row, each)) is not None:
            name = f"{where}{under}: OSDP over the best other"
            yield Target(name=name, limit=OF_BEST_OTHER, measured=of_best, is_least=True)
    for found, limit, what in ((off, PREDICTED, "predicted ratio is"), (sent, SENT, "bytes sent are")):
        if found:
            worst, who = max(found)
            yield Target(name=f"{where}{who}: {what} off by", limit=limit, measured=worst)


def _race(entrant: Row) -> str:
    """Length of a race, what it cost, and whether it is one that a long fit has by default."""
    if "race_steps" not in entrant:
        return ""
    is_open = "open" if entrant["is_open"] else "not open"
    return f"{entrant['race_steps']} steps, {entrant['race_cost']:+.1f}, {is_open}"


def _under(limits: Sequence[float | None]) -> str:
    return "".join(", unlimited" if limit is None else f", {limit:g}x" for limit in limits)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _percent(predicted: float | None, found: float | None) -> str:
    return "" if predicted is None or found is None else f"{predicted / found - 1:+.2%}"
