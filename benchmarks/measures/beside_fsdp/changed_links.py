"""Links whose rate changes while a model trains: steps until a plan that is better then is in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.measures.beside_fsdp.cases import ChangedLinks
from benchmarks.measures.links import on_links_that_can_be_had, on_ranks
from benchmarks.measures.section import Row, Section, Target
from lightning_osdp.core.text.duration import format_seconds

MOST_STEPS = 160
"""Steps until the better plan is in use: two medians of 50 steps, and a race."""
OF_FRESH = 1.03
"""Seconds of a step under the plan in use at the end, over those of a fit that begins on the changed links."""
_NUM_FRESH_STEPS = 70
"""Steps of that fit, which has a race."""
_NUM_TIMED = 50
"""Steps before the change, whose median is taken."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and rates of its links in 10^6 bit/s."""

    model: str
    num_ranks: int
    rate_mbit: float | None
    """Rate at first; None: links are not shaped, and all-gathers come to wait."""
    rate_then_mbit: float | None
    room: float
    changed_at: int
    num_steps: int


def section(name: str, asked: ChangedLinks) -> Section:
    """Section of one fit, if its links can be had here."""
    before, after = asked.rates_mbit or (None, None)
    case = Case(
        model=asked.model,
        num_ranks=asked.num_ranks,
        rate_mbit=before,
        rate_then_mbit=after,
        room=asked.room,
        changed_at=asked.changed_at,
        num_steps=asked.num_steps,
    )
    return Section(name=name, cases=on_links_that_can_be_had([case]), measure=measure, table=table, targets=targets)


def measure(case: Case) -> dict[str, Any]:
    """Median seconds of steps before and after the change, under the plan at the end, and of a fit that begins then."""
    found = on_ranks(
        case.num_ranks,
        case.rate_mbit,
        "benchmarks.testbed.beside_fsdp.changed_links:on_one_rank",
        model=case.model,
        room=case.room,
        rate_then_mbit=case.rate_then_mbit,
        changed_at=case.changed_at,
        num_steps=case.num_steps,
        num_fresh_steps=_NUM_FRESH_STEPS,
    )
    steps, changed_at = found["changed"], case.changed_at - 1  # the first step has no seconds
    raced = [number for number, step in enumerate(steps) if step["is_in_race"] and number >= changed_at]
    first, last = (raced[0], raced[-1]) if raced else (len(steps), len(steps) - 1)

    def median_s(part: Sequence[Any]) -> float | None:
        return median(step["seconds"] for step in part) if part else None

    fresh = found["fresh"]
    over = max((number for number, step in enumerate(fresh) if step["is_in_race"]), default=0)
    return {
        "before_s": median_s(steps[changed_at - _NUM_TIMED : changed_at]),
        "slow_s": median_s(steps[changed_at:first]),
        "after_s": median_s(steps[last + 1 :]),
        "fresh_s": median_s(fresh[over + 1 :]),
        "steps_until": last + 1 - changed_at if raced else None,
        "num_raced": len(raced),
        "notes": found["changed_notes"],
        "fresh_notes": found["fresh_notes"],
    }


def table(rows: Sequence[Row]) -> Table:
    """Draws one line for each row, and the winners of its races."""
    drawn = Table("model", "links", "winners", title="Links that become slower")
    for column in ("a step before", "after", "new plan", "of a fit that begins then", "steps until the new plan"):
        drawn.add_column(column, justify="right")
    for row in rows:
        case = row["case"]
        rates = [case["rate_mbit"], case["rate_then_mbit"]]
        links = "all-gathers wait" if rates[0] is None else "{:g} to {:g} Mbit/s".format(*rates)
        seconds = [row[name] for name in ("before_s", "slow_s", "after_s", "fresh_s")]
        notes = [note.partition(" won ")[0] for note in (*row["notes"], *row["fresh_notes"])]
        shown = ["" if each is None else format_seconds(each) for each in seconds]
        drawn.add_row(case["model"], links, ", ".join(notes), *shown, str(row["steps_until"] or "never"))
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """Targets of how soon the plan changes, and of how good it is."""
    found = []
    for row in rows:
        steps = row["steps_until"] or row["case"]["num_steps"]
        found.append(Target(name="steps until the new plan", limit=MOST_STEPS, measured=steps))
        if row["after_s"] is not None:
            for name, limit, other in (
                ("a step, over one of a fit that begins on the changed links", OF_FRESH, row["fresh_s"]),
                ("a step, over one under the plan before", 1.02, row["slow_s"]),
            ):
                if other is not None:
                    found.append(Target(name=name, limit=limit, measured=row["after_s"] / other))
    return found
