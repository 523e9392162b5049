"""`greedy`: the LP's steps as far as they fit, then exchanges. Near-instant, with a certified gap.

An exchange is an *upgrade* of one member to a faster choice, or one paid for by the *downgrade* of another member; of
all, the one that saves most is applied, while it helps. With the LP's price p, the *reduced cost* of a choice is

    r[g, c] = time_s[g, c] + p * memory_bytes[g, c] - min over c' of the same       >= 0

and by LP duality every assignment's time is at least  bound_s + sum_g sum_c n[g, c] * r[g, c].  A choice whose reduced
cost is not below the present ``time_s - bound_s`` is in no better assignment, and is not looked at.

Before exchanges the gap is below the LP's one divided step: a fraction that falls as 1 / number of operators. Steps and
each exchange take O(n log n) for n choices.

Kellerer, Pferschy and Pisinger, "Knapsack Problems" (2004), chapters 11.2 (greedy) and 11.3 (reduction).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from lightning_osdp.planner.search.bound import Relaxation, relax
from lightning_osdp.planner.search.problem import Choice, Problem, Solution, certify

MAX_MOVES = 20_000
"""Moves that exchanges may look at in total, at about a microsecond each: so that 3000 operators stay below 0.1 s.

Only there and above is it reached, and the gap is then below 0.01% without exchanges.
"""


def greedy(problem: Problem) -> Solution:
    """A good assignment with its certified gap, at once.

    Raises:
        InfeasibleError: no assignment fits.
    """
    relaxation = relax(problem)
    return certify(problem, assign_greedily(problem, relaxation), bound_s=relaxation.bound_s)


def assign_greedily(problem: Problem, relaxation: Relaxation) -> list[list[int]]:
    """Members per group and choice: ordered steps, then exchanges."""
    counts = _take_steps(problem, relaxation)
    _exchange(problem, relaxation, counts)
    _repair(problem, relaxation, counts)
    return counts


def reduced_costs(problem: Problem, relaxation: Relaxation, group: int) -> dict[int, float]:
    """Seconds that each choice on the group's frontier costs beyond the best one, with memory at the LP's price."""
    choices = problem.groups[group].choices
    priced = {
        index: choices[index].time_s + relaxation.price * choices[index].memory_bytes
        for index in relaxation.frontiers[group]
    }
    least = min(priced.values())
    return {index: value - least for index, value in priced.items()}


def _take_steps(problem: Problem, relaxation: Relaxation) -> list[list[int]]:
    counts = [[0] * len(group.choices) for group in problem.groups]
    for group, kept, row in zip(problem.groups, relaxation.frontiers, counts, strict=True):
        if group.count:
            row[kept[0]] = group.count
    left_bytes = problem.budget_bytes - problem.least_bytes
    for step in relaxation.steps:
        row = counts[step.group]
        movable = row[step.source]
        if movable * step.extra_bytes > left_bytes:
            movable = int(left_bytes // step.extra_bytes)
        if movable:
            row[step.source] -= movable
            row[step.target] += movable
            left_bytes -= movable * step.extra_bytes
    return counts


class _Move(NamedTuple):
    """Change of one member's choice."""

    extra_bytes: float
    saved_s: float
    group: int
    source: int
    target: int


def _exchange(problem: Problem, relaxation: Relaxation, counts: list[list[int]]) -> None:
    """Applies the best exchange until none helps."""
    excess_s = problem.time_s(counts) - relaxation.bound_s
    if excess_s <= 0:
        return
    left_bytes = problem.budget_bytes - problem.memory_bytes(counts)
    reduced = [
        (index, reduced_costs(problem, relaxation, index))
        for index, group in enumerate(problem.groups)
        if group.count and len(relaxation.frontiers[index]) > 1
    ]
    num_moves = 0
    while num_moves < MAX_MOVES:
        upgrades, downgrades = _moves(problem, reduced, counts, excess_s)
        num_moves += len(upgrades) + len(downgrades)
        best = _best_exchange(upgrades, downgrades, counts, left_bytes)
        # below that, the excess is rounding, and exchanges would go round in circles
        if sum(move.saved_s for move in best) <= 1e-12 * abs(relaxation.bound_s):
            return
        for move in best:
            counts[move.group][move.source] -= 1
            counts[move.group][move.target] += 1
            excess_s -= move.saved_s
            left_bytes -= move.extra_bytes


def _moves(
    problem: Problem, reduced: list[tuple[int, dict[int, float]]], counts: list[list[int]], excess_s: float
) -> tuple[list[_Move], list[_Move]]:
    """Upgrades by rising memory, and downgrades, to choices that a better assignment may contain."""
    upgrades, downgrades = [], []
    for group, costs in reduced:
        targets = [target for target, cost in costs.items() if cost < excess_s]
        choices, row = problem.groups[group].choices, counts[group]
        for source in costs:
            if not row[source]:
                continue
            old = choices[source]
            for target in targets:
                new = choices[target]
                move = _Move(new.memory_bytes - old.memory_bytes, old.time_s - new.time_s, group, source, target)
                if move.saved_s > 0:
                    upgrades.append(move)
                elif move.saved_s < 0:
                    downgrades.append(move)
    upgrades.sort()
    return upgrades, downgrades


def _best_exchange(
    upgrades: list[_Move], downgrades: list[_Move], counts: list[list[int]], left_bytes: float
) -> tuple[_Move, ...]:
    """The upgrade, alone or after a downgrade, that saves most; empty where nothing saves."""
    sizes = [upgrade.extra_bytes for upgrade in upgrades]
    best_two = list(_two_best_so_far(upgrades, counts))
    best: tuple[_Move, ...] = ()
    best_saved_s = 0.0
    alone = bisect_right(sizes, left_bytes)
    if alone:
        best = best_two[alone - 1][:1]
        best_saved_s = best[0].saved_s
    for downgrade in downgrades:
        affordable = bisect_right(sizes, left_bytes - downgrade.extra_bytes)
        for upgrade in best_two[affordable - 1] if affordable else ():
            if _same_member(downgrade, upgrade, counts):
                continue
            if downgrade.saved_s + upgrade.saved_s > best_saved_s:
                best, best_saved_s = (downgrade, upgrade), downgrade.saved_s + upgrade.saved_s
            break
    return best


def _two_best_so_far(upgrades: list[_Move], counts: list[list[int]]) -> Iterator[tuple[_Move, ...]]:
    """Yields the upgrade that saves most in each prefix of the upgrades, and the best one of any other member."""
    best: tuple[_Move, ...] = ()
    for upgrade in upgrades:
        candidates = [upgrade, *best]
        candidates.sort(key=lambda move: move.saved_s, reverse=True)
        others = [move for move in candidates[1:] if not _same_member(candidates[0], move, counts)]
        best = (candidates[0], *others[:1])
        yield best


def _same_member(one: _Move, other: _Move, counts: list[list[int]]) -> bool:
    """True where both moves need the same, single member."""
    return one.group == other.group and one.source == other.source and counts[one.group][one.source] < 2


def _repair(problem: Problem, relaxation: Relaxation, counts: list[list[int]]) -> None:
    """Takes back what rounding put over the budget: the cheapest downgrades, at most a handful."""

    def choice(group: int, index: int) -> Choice:
        return problem.groups[group].choices[index]

    while problem.memory_bytes(counts) > problem.budget_bytes:
        _, group, source, target = min(
            (choice(group, target).time_s - choice(group, source).time_s, group, source, target)
            for group, kept in enumerate(relaxation.frontiers)
            for target, source in itertools.pairwise(kept)
            if counts[group][source]
        )
        counts[group][source] -= 1
        counts[group][target] += 1
