"""The LP relaxation: the least time if an operator could be divided between its choices. O(n log n) for n choices.

    minimise    sum_g sum_c  n[g, c] * time_s[g, c]
    subject to  sum_g sum_c  n[g, c] * memory_bytes[g, c]  <=  budget_bytes
                sum_c n[g, c] = count[g],   n[g, c] >= 0                     (`Problem`, without "whole")

Start with every member at its least memory, take the steps of all groups' hulls (`dominance.hull`) by falling rate, and
divide the last one to fill the budget. Within a hull rates fall, so no step is taken before its predecessor.

    bound_s = sum_g count[g] * time_s[g, least memory]  -  sum of taken steps
    price   = rate of the divided step, in s per byte (the LP's dual); 0 where everything fits

Sinha and Zoltners (1979), section 2; Kellerer, Pferschy and Pisinger, "Knapsack Problems" (2004), chapter 11.2.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from lightning_osdp.planner.search.dominance import frontier, hull
from lightning_osdp.planner.search.problem import Problem


class Step(NamedTuple):
    """A member of a group moves from one vertex of the hull to the next."""

    rate: float
    """Seconds saved per byte."""
    group: int
    source: int
    """Index of the choice that is left."""
    target: int
    """Index of the choice that is taken."""
    extra_bytes: float
    saved_s: float


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """The LP's optimum, and what was computed on the way to it."""

    bound_s: float
    """Seconds that no assignment goes below."""
    price: float
    """Seconds that one more byte of budget would save."""
    frontiers: tuple[list[int], ...]
    """Indices of the choices that none dominates, by rising memory, per group."""
    steps: list[Step]
    """Steps of all groups by falling rate; a group's own steps in their order."""


def relax(problem: Problem) -> Relaxation:
    """The LP's optimum.

    Raises:
        InfeasibleError: not even the smallest choices fit.
    """
    problem.require_feasible()
    frontiers = tuple(frontier(group.choices) for group in problem.groups)
    steps = _steps(problem, frontiers)
    terms = [
        group.count * group.choices[kept[0]].time_s
        for group, kept in zip(problem.groups, frontiers, strict=True)
        if group.count
    ]
    left_bytes = problem.budget_bytes - problem.least_bytes
    price = 0.0
    for step in steps:
        count = problem.groups[step.group].count
        needed_bytes = count * step.extra_bytes
        if needed_bytes > left_bytes:
            price = step.rate
            terms.append(-count * step.saved_s * (left_bytes / needed_bytes))
            break
        left_bytes -= needed_bytes
        terms.append(-count * step.saved_s)
    return Relaxation(bound_s=math.fsum(terms), price=price, frontiers=frontiers, steps=steps)


def _steps(problem: Problem, frontiers: tuple[list[int], ...]) -> list[Step]:
    steps = []
    for index, (group, kept) in enumerate(zip(problem.groups, frontiers, strict=True)):
        if group.count == 0 or len(kept) == 1:
            continue
        vertices = hull(group.choices, kept)
        rate = math.inf
        for source, target in itertools.pairwise(vertices):
            old, new = group.choices[source], group.choices[target]
            extra_bytes, saved_s = new.memory_bytes - old.memory_bytes, old.time_s - new.time_s
            # rates of vertices on a line differ by rounding, and a step must not come before its predecessor
            rate = min(rate, saved_s / extra_bytes)
            steps.append(Step(rate, index, source, target, extra_bytes, saved_s))
    # stable, also in reverse: equal rates keep a group's steps in order
    steps.sort(key=attrgetter("rate"), reverse=True)
    return steps
