"""Choices that can be left out of a search: dominated ones, and (for the LP) those above the lower convex hull.

A choice is dominated where another takes no more memory and no more time; some optimal solution uses none of them. On
the *frontier* of the rest time falls with rising memory; on its *hull* every step also saves no more seconds per byte
than the one before.

Sinha and Zoltners, "The multiple-choice knapsack problem", Operations Research 27 (1979): propositions 1 (dominance)
and 2 (LP-dominance).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from lightning_osdp.planner.search.problem import Choice


def frontier(choices: Sequence[Choice]) -> list[int]:
    """Indices of the choices that none dominates, by rising memory; of equal ones the first.

    Example:
        >>> frontier([Choice(3.0, 10), Choice(1.0, 40), Choice(3.0, 20), Choice(4.0, 10), Choice(2.0, 20)])
        [0, 4, 1]
    """
    order = sorted((choice.memory_bytes, choice.time_s, index) for index, choice in enumerate(choices))
    kept = []
    fastest_s = None
    for _, time_s, index in order:
        if fastest_s is None or time_s < fastest_s:
            kept.append(index)
            fastest_s = time_s
    return kept


def hull(choices: Sequence[Choice], kept: Sequence[int]) -> list[int]:
    """Indices of the `frontier` of choices on its lower convex hull, time against memory, by rising memory.

    Vertices on a straight line stay, to rounding: finer steps waste less memory in `greedy`.

    Example:
        >>> choices = [Choice(4.0, 0), Choice(3.5, 1), Choice(1.0, 2), Choice(0.5, 3), Choice(0.0, 4)]
        >>> hull(choices, frontier(choices))
        [0, 2, 3, 4]
    """
    vertices: list[int] = []
    for index in kept:
        new = choices[index]
        while len(vertices) > 1:
            middle, left = choices[vertices[-1]], choices[vertices[-2]]
            saved_before = (left.time_s - middle.time_s) * (new.memory_bytes - middle.memory_bytes)
            saved_after = (middle.time_s - new.time_s) * (middle.memory_bytes - left.memory_bytes)
            if saved_before >= saved_after:
                break
            vertices.pop()
        vertices.append(index)
    return vertices


class Skyline:
    """Points of bytes and seconds that no other one dominates, built one by one.

    Args:
        tolerance_s: times that differ by less are equal. A few sums in another order must not count as progress.
    """

    def __init__(self, tolerance_s: float = 0.0) -> None:
        self._tolerance_s = tolerance_s
        self._bytes: list[float] = []
        self._times_s: list[float] = []

    def add(self, num_bytes: float, time_s: float) -> bool:
        """True where the point was not dominated by an earlier one; if so, it takes the place of those it dominates.

        Example:
            >>> skyline = Skyline()
            >>> [skyline.add(*point) for point in ((5, 1.0), (6, 1.0), (2, 3.0), (4, 0.5), (5, 0.75))]
            [True, False, True, True, False]
        """
        sizes, times_s = self._bytes, self._times_s
        start = bisect_right(sizes, num_bytes)
        if start and times_s[start - 1] <= time_s + self._tolerance_s:
            return False
        end = start
        while end < len(sizes) and times_s[end] >= time_s:
            end += 1
        if start and sizes[start - 1] == num_bytes:
            start -= 1
        sizes[start:end] = [num_bytes]
        times_s[start:end] = [time_s]
        return True
