"""Peak memory of one step on real ranks with gloo: predicted for every rank, and counted on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.families import FAMILIES
from benchmarks.measures.accuracy import peaks
from benchmarks.measures.accuracy.memory import Case, count, draw_cases, phases, predict
from benchmarks.measures.section import Row, Section
from benchmarks.testbed.local import local_ranks
from benchmarks.testbed.memory import PHASES
from lightning_osdp import Plan

NUM_RANKS = (2, 4)
NUM_CASES = 2
"""Number of cases of each family."""
NUM_STEPS = 3
"""Number of steps, of which the least counts: a thread of gloo may hold a tensor longer than the step does."""


def section(num_cases: int) -> Section:
    """The first random cases of every family, each on 2 and 4 ranks."""
    drawn = [case for family in FAMILIES for case in draw_cases(family, min(num_cases, NUM_CASES))]
    return Section(
        name="gloo",
        cases=[replace(case, world_size=num_ranks) for case in drawn for num_ranks in NUM_RANKS],
        measure=measure,
        table=partial(peaks.table, title="The same on real ranks with gloo: the largest of all ranks"),
        targets=lambda rows: [*peaks.targets(rows, "gloo, largest"), *peaks.targets(_each(rows), "gloo, each rank")],
        misses=lambda rows: peaks.misses(_each(rows)),
    )


def measure(case: Case) -> dict[str, Any]:
    """Predicts and counts a case on every rank.

    Returns:
        As `memory.measure`, the most of all ranks in each phase; and under ``ranks`` the same of each.
    """
    ranks = range(case.world_size)
    _, plan = predict(case)
    predicted = [phases(predict(case, rank=rank, reduce_scatter_copies=True)[0]) for rank in ranks]
    counted = local_ranks(case.world_size).run(count_on_one_rank, case=case, plan=plan)
    each = [peaks.compared(predicted[rank], counted[rank]) for rank in ranks]
    return {**peaks.compared(_most(predicted), _most(counted)), "ranks": each}


def count_on_one_rank(case: Case, plan: Plan) -> dict[str, int]:
    """Counts the peaks of a plan's steps on one rank; every rank runs this."""
    return dict(count(case, plan, num_steps=NUM_STEPS).phases)


def _each(rows: Sequence[Row]) -> list[Row]:
    """A row for every rank."""
    return [{"case": {**row["case"], "rank": rank}, **found} for row in rows for rank, found in enumerate(row["ranks"])]


def _most(ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {phase: max(rank[phase] for rank in ranks) for phase in PHASES if phase in ranks[0]}
