"""`exhaustive`: the oracle. Looks at every assignment, by counts, and shares no idea with the other solvers.

A group of n members with k choices has  C(n + k - 1, k - 1)  rows of counts; a problem has their product. It is
equation 1 of OSDP (Jiang et al. 2022), taken literally at one batch size.
"""

from __future__ import annotations

import itertools
import math

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.search.problem import Problem, Solution, certify

MAX_ASSIGNMENTS = 100_000
"""Assignments above which a problem is refused: about a second in CPython."""


def exhaustive(problem: Problem) -> Solution:
    """The best assignment, by looking at all of them; among equally fast ones the smallest.

    Raises:
        InfeasibleError: no assignment fits.
        ConfigurationError: there are more than `MAX_ASSIGNMENTS`.
    """
    problem.require_feasible()
    num_assignments = math.prod(
        math.comb(group.count + len(group.choices) - 1, len(group.choices) - 1) if group.count else 1
        for group in problem.groups
    )
    if num_assignments > MAX_ASSIGNMENTS:
        raise ConfigurationError(
            f"search='exhaustive' expects a problem with at most {MAX_ASSIGNMENTS:,} assignments, got"
            f" {num_assignments:.3g} ({problem.num_operators:,} operators in {len(problem.groups):,} groups of equal"
            " ones). Use search='depth_first', which is exact as well and cuts what cannot be best."
        )
    rows = [_rows(group.count, len(group.choices)) for group in problem.groups]
    fitting = (counts for counts in itertools.product(*rows) if problem.memory_bytes(counts) <= problem.budget_bytes)
    best = min(fitting, key=lambda counts: (problem.time_s(counts), problem.memory_bytes(counts)))
    return certify(problem, best, bound_s=problem.time_s(best), num_nodes=num_assignments)


def _rows(num_members: int, num_choices: int) -> list[tuple[int, ...]]:
    """All ways to write the members as a sum of one count per choice."""
    taken = itertools.combinations_with_replacement(range(num_choices), num_members)
    return sorted(tuple(map(each.count, range(num_choices))) for each in taken)
