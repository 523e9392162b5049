"""The problem that every solver takes, and the solution that it returns. Numbers only.

    minimise    sum_g sum_c  n[g, c] * time_s[g, c]
    subject to  sum_g sum_c  n[g, c] * memory_bytes[g, c]  <=  budget_bytes
                sum_c n[g, c] = count[g],   n[g, c] >= 0 whole

Equal operators form one group, and a solution says how many of its members take each choice: members of a group are
interchangeable, so counts lose nothing and keep permutations out of the search.

Sums are correctly rounded (`math.fsum`): they do not depend on the order of groups, and no solver can disagree with
another about whether an assignment fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_osdp.errors import InfeasibleError


@dataclass(frozen=True)
class Choice:
    """One way to treat one operator."""

    time_s: float
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """Equal operators and the choices that each of them has."""

    choices: tuple[Choice, ...]
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Groups and the bytes that all their members may take together."""

    groups: tuple[Group, ...]
    budget_bytes: float

    @property
    def num_operators(self) -> int:
        """Members of all groups."""
        return sum(group.count for group in self.groups)

    @property
    def least_bytes(self) -> float:
        """Bytes below which no solution exists."""
        return math.fsum(
            group.count * min(choice.memory_bytes for choice in group.choices) for group in self.groups if group.count
        )

    def time_s(self, counts: Sequence[Sequence[int]]) -> float:
        """Time of an assignment: ``counts[g][c]`` members of group ``g`` take its choice ``c``."""
        return math.fsum(
            taken * choice.time_s
            for group, row in zip(self.groups, counts, strict=True)
            for choice, taken in zip(group.choices, row, strict=True)
            if taken
        )

    def memory_bytes(self, counts: Sequence[Sequence[int]]) -> float:
        """Bytes of an assignment: what solvers compare with the budget."""
        return math.fsum(
            taken * choice.memory_bytes
            for group, row in zip(self.groups, counts, strict=True)
            for choice, taken in zip(group.choices, row, strict=True)
            if taken
        )

    def require_feasible(self) -> None:
        """Raises where the budget is below `least_bytes`.

        Raises:
            InfeasibleError: no assignment fits.
        """
        least_bytes = self.least_bytes
        if least_bytes > self.budget_bytes:
            raise InfeasibleError(
                f"No assignment fits: the limit is {self.budget_bytes:,.0f} bytes, and {self.num_operators} operators"
                f" take at least {least_bytes:,.0f} bytes, each with its smallest choice."
                f" Raise the limit by {least_bytes - self.budget_bytes:,.0f} bytes, or offer smaller choices."
            )


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A feasible assignment with its certificate: no solution takes less than ``bound_s``."""

    counts: tuple[tuple[int, ...], ...]
    """Numbers of members that take each choice, per group; aligned with ``Problem.groups`` and ``Group.choices``."""
    time_s: float
    memory_bytes: float
    bound_s: float
    """Lower bound on the time of every feasible assignment; equal to ``time_s`` where this one is proven best."""
    num_nodes: int = 0
    """Search-tree nodes visited."""
    is_cut_short: bool = False
    """True where the search ended at its node budget, before it had proven this assignment or found a better one."""

    @property
    def gap(self) -> float:
        """Gap to the bound, as a fraction of it: ``time_s / bound_s - 1``; no assignment is faster by more."""
        return self.time_s / self.bound_s - 1 if self.bound_s > 0 else 0.0


def certify(
    problem: Problem,
    counts: Sequence[Sequence[int]],
    *,
    bound_s: float,
    num_nodes: int = 0,
    is_cut_short: bool = False,
) -> Solution:
    """An assignment that fits as a `Solution`, its time and bytes computed anew from the problem.

    A ``bound_s`` that rounding put above the assignment's time is cut off.
    """
    time_s, memory_bytes = problem.time_s(counts), problem.memory_bytes(counts)
    assert memory_bytes <= problem.budget_bytes, (memory_bytes, problem.budget_bytes)
    return Solution(
        counts=tuple(map(tuple, counts)),
        time_s=time_s,
        memory_bytes=memory_bytes,
        bound_s=min(bound_s, time_s),
        num_nodes=num_nodes,
        is_cut_short=is_cut_short,
    )
