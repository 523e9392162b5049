"""The nested knapsack itself: dynamic programming over the units in the order in which forward leaves them.

A state says what the first j units hold and take: the bytes that count under the j-th constraint, and the least room
that the constraints so far have left, which what a unit holds from one micro-batch to the next takes from all of them.
Between two states of the same j, one that holds no less, leaves no more room and takes no less time than the other
leads to nothing better. A state is dropped, too, where a Lagrangian bound is no better than a plan in hand: with a
price p on the k-th constraint, for j < k,

    time_s + p * (held - room_k) + sum over u > j of min (time_s + p * bytes of u that count under it)

Exact, to a relative 1e-12, while no more states than the width are left at any j. Beyond that the most promising ones
go on, and the least bound of the others is what is certified.

Complexity: O(n * width * prices) for n units, and a logarithm of the width.

References:
    Nemhauser and Ullmann, "Discrete dynamic programming and capital allocation" (1969); Lawler and Moore, "A
    functional equation and its application to resource allocation and sequencing problems" (1969), where nested
    constraints are deadlines.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from lightning_osdp.core.axes import Treatment
from lightning_osdp.planner.assign.additive import Additive, Modes
from lightning_osdp.planner.cost import Held

_Path: TypeAlias = "tuple[Treatment, _Path] | None"


class _Option(NamedTuple):
    held: Held
    time_s: float
    mode: Treatment


class _State(NamedTuple):
    held_bytes: float
    left_bytes: float
    """Room under the constraints so far; infinite where nothing to come takes any of it."""
    time_s: float
    bound_s: float
    """Seconds that nothing below it can be faster than."""
    path: _Path


class Price(NamedTuple):
    """A multiplier of one constraint; any is valid, the dual price of its relaxation cuts most."""

    num_units: int
    """k: number of units that the constraint is on."""
    s_per_byte: float


def improve(
    problem: Additive, modes: Modes, rooms: Sequence[float], *, prices: Sequence[Price], width: int
) -> tuple[Modes, float]:
    """The best modes, or the best found from these on, which fit, and the seconds that no modes that fit go below.

    Rooms are those of `StepMemory.room_bytes`; ``width`` states go on from each unit to the next.
    """
    memory = problem.memory
    menus = [
        [_Option(memory.held(place, mode), problem.times_s[unit][mode], mode) for mode in problem.options[unit]]
        for place, unit in enumerate(memory.order)
    ]
    known_s = problem.time_s(modes)
    ordered_s = sum(problem.times_s[unit][modes[unit]] for unit in memory.order)
    rests = [_rests(menus, price, rooms) for price in (Price(0, 0.0), *prices)]
    any_stays = any(option.held.window_bytes for menu in menus for option in menu)
    first = _State(0.0, rooms[0] if any_stays else math.inf, known_s - ordered_s, -math.inf, None)
    states, bound_s = [first], known_s
    for j, menu in enumerate(menus, start=1):
        extended = _extended(states, menu, rooms[j], [rest[j] for rest in rests], cut_s=known_s * (1 - 1e-12))
        states = _undominated(extended)
        if len(states) > width:
            states.sort(key=attrgetter("bound_s"))
            bound_s = min(bound_s, states[width].bound_s)
            del states[width:]
    best = min(states, key=attrgetter("time_s"), default=None)
    if best is None:
        return modes, bound_s
    found, path = list(modes), best.path
    for unit in reversed(memory.order):
        assert path is not None
        found[unit], path = path
    return tuple(found), min(bound_s, best.time_s)


def _rests(menus: Sequence[Sequence[_Option]], price: Price, rooms: Sequence[float]) -> list[tuple[float, float]]:
    """Price of what is held by then, and the bound's share of all that comes after, for each j."""
    num_units, s_per_byte = price
    after_s, free_s = -s_per_byte * rooms[num_units], 0.0
    rests = []
    for j in range(len(menus), -1, -1):
        if j < len(menus):
            free_s += min(option.time_s for option in menus[j])
            after_s += min(
                option.time_s
                + s_per_byte * (option.held.window_bytes + (option.held.prefix_bytes if j < num_units else 0.0))
                for option in menus[j]
            )
        rests.append((s_per_byte, after_s) if j < num_units else (0.0, free_s))
    return rests[::-1]


def _extended(
    states: Sequence[_State],
    menu: Sequence[_Option],
    room_bytes: float,
    rests: Sequence[tuple[float, float]],
    *,
    cut_s: float,
) -> list[_State]:
    """States with one more unit that fit and may be faster than ``cut_s``."""
    extended = []
    for held_bytes, before_bytes, before_s, _, path in states:
        for (prefix_bytes, window_bytes), option_s, mode in menu:
            total_bytes, time_s = held_bytes + prefix_bytes + window_bytes, before_s + option_s
            left_bytes = before_bytes - window_bytes
            if total_bytes > room_bytes or left_bytes < 0:
                continue
            bound_s = -math.inf
            for price, rest_s in rests:  # a loop, for there are millions of states
                least_s = time_s + price * total_bytes + rest_s
                if least_s >= cut_s:
                    break
                bound_s = max(bound_s, least_s)
            else:
                if left_bytes != math.inf:
                    left_bytes = min(left_bytes, room_bytes - total_bytes)
                extended.append(_State(total_bytes, left_bytes, time_s, bound_s, (mode, path)))
    return extended


def _undominated(states: list[_State]) -> list[_State]:
    """States that no other one is at least as good as in bytes held, room left and time."""
    states.sort(key=lambda state: (state.held_bytes, -state.left_bytes, state.time_s))
    kept = []
    lefts: list[float] = []  # rising room of the states kept so far, with
    times_s: list[float] = []  # their times, which rise as well: less room is worth having only if it is faster
    for state in states:
        place = bisect_left(lefts, state.left_bytes)
        if place < len(lefts) and times_s[place] <= state.time_s:
            continue
        kept.append(state)
        end = bisect_right(lefts, state.left_bytes)
        begin = bisect_left(times_s, state.time_s, 0, end)
        lefts[begin:end], times_s[begin:end] = [state.left_bytes], [state.time_s]
    return kept
