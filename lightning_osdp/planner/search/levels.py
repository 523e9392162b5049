"""Levels of recomputation: which results of a block are kept, so that less of it runs again in backward.

A kept result takes its bytes from forward to backward and saves the seconds of running it again. These add up over
results, so sets of results are choices of a knapsack. Equal blocks may stand at different levels. The seconds of a
mixture lie on a line between the levels, and on the lower convex hull of all sets are only those that take results by
falling seconds per byte (Dantzig's relaxation), besides keeping nothing and keeping all that backward needs.

A few of these corners are enough: each next level is the one that lies farthest below the lines between those before.
The largest distance that is left bounds what more levels would save.

References:
    Dantzig, "Discrete-variable extremum problems", Operations Research 5 (1957).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_osdp.planner.search.dominance import frontier, hull
from lightning_osdp.planner.search.problem import Choice

ENOUGH = 0.03
"""Fraction of the seconds of running all again below which another level is not worth having."""


class Result(NamedTuple):
    """Result of an operation that may be kept."""

    seconds: float
    """Seconds of running the operation again."""
    num_bytes: float


class Levels(NamedTuple):
    """Sets of kept results between keeping nothing and keeping all that backward needs."""

    kept: tuple[tuple[int, ...], ...]
    """Positions of the results that each level keeps, ascending; the level with the fewest bytes first."""
    gap: float
    """No mixture of any sets saves more, for the same bytes, by more than this fraction of the seconds of keeping
    nothing."""


def find_levels(
    results: Sequence[Result], *, nothing_s: float, everything_bytes: float, overhead_s: float = 0.0, most: int
) -> Levels:
    """At most so many levels, with what other ones would save.

    Args:
        results: those that may be kept.
        nothing_s: seconds that run again where nothing is kept.
        everything_bytes: bytes of keeping all that backward needs, beyond those of keeping nothing.
        overhead_s: seconds that any level takes for keeping some results and not others.
        most: number of levels, at least 1.

    Example:
        >>> results = [Result(4.0, 1.0), Result(1.0, 4.0), Result(3.9, 1.0)]
        >>> find_levels(results, nothing_s=10.0, everything_bytes=20.0, most=2).kept
        ((0, 2), (0, 1, 2))
    """
    order = sorted(
        (position for position, result in enumerate(results) if result.seconds > 0),
        key=lambda position: (-results[position].seconds / max(results[position].num_bytes, 1.0), position),
    )
    choices = [Choice(nothing_s, 0.0), Choice(0.0, everything_bytes)]
    time_s, num_bytes = nothing_s + overhead_s, 0.0
    for position in order:
        time_s -= results[position].seconds
        num_bytes += results[position].num_bytes
        choices.append(Choice(max(0.0, time_s), num_bytes))
    corners = hull(choices, frontier(choices))
    chosen = list(dict.fromkeys((0, len(corners) - 1)))
    while True:
        below_s, corner = max(
            (
                (_between(choices[corners[left]], choices[corners[right]], choices[corners[corner]]), corner)
                for left, right in pairwise(chosen)
                for corner in range(left + 1, right)
            ),
            default=(0.0, 0),
        )
        if sum(corners[each] > 1 for each in chosen) >= most or below_s <= ENOUGH * nothing_s:
            break
        chosen = sorted([*chosen, corner])
    taken = (corners[corner] - 1 for corner in chosen if corners[corner] > 1)
    return Levels(tuple(tuple(sorted(order[:number])) for number in taken), below_s / nothing_s if below_s else 0.0)


def _between(left: Choice, right: Choice, middle: Choice) -> float:
    """Seconds of the line from left to right beyond those of the middle, at the bytes of the middle."""
    share = (middle.memory_bytes - left.memory_bytes) / (right.memory_bytes - left.memory_bytes)
    return left.time_s + share * (right.time_s - left.time_s) - middle.time_s
