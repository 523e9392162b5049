"""The nested knapsack itself: dynamic programming over the units in the order in which forward leaves them.

A state says what the first j units keep and take. Of two states of the same j, one that keeps no less and takes no
less time than the other leads to nothing better, for every later constraint is on a sum that contains these units.
A state is dropped, too, where a Lagrangian bound is no better than a plan in hand: with a price p on the k-th
constraint, for j < k,

    time_s + p * (kept - room_k) + sum over j < u <= k of min (time_s + p * bytes) + sum over u > k of min time_s

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
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from lightning_osdp.assign.additive import Additive, Modes
from lightning_osdp.core.modes import ShardingMode

_Path: TypeAlias = "tuple[ShardingMode, _Path] | None"


class _Option(NamedTuple):
    kept_bytes: float
    time_s: float
    mode: ShardingMode


class _State(NamedTuple):
    kept_bytes: float
    time_s: float
    bound_s: float
    """Seconds that nothing below it can be faster than."""
    path: _Path


class Price(NamedTuple):
    """A multiplier of one constraint; any is valid, the dual price of its relaxation cuts most."""

    num_units: int
    """k: how many units the constraint is on."""
    s_per_byte: float


def improve(
    problem: Additive, modes: Modes, rooms: Sequence[float], *, prices: Sequence[Price], max_states: int
) -> tuple[Modes, float]:
    """The best modes, or the best found, and the seconds that no modes that fit can go below.

    Args:
        problem: what is fixed.
        modes: a plan that fits.
        rooms: of `StepMemory.room_bytes`.
        prices: of the constraints that matter.
        max_states: about how many states to look at, those of all units together.
    """
    memory = problem.memory
    menus = [
        [_Option(num_bytes * mode.resident, problem.times_s[unit][mode], mode) for mode in problem.options[unit]]
        for unit, num_bytes in zip(memory.order, memory.gathered_bytes, strict=True)
    ]
    known_s = problem.time_s(modes)
    ordered_s = sum(problem.times_s[unit][modes[unit]] for unit in memory.order)
    rests = [_rests(menus, price, rooms) for price in (Price(0, 0.0), *prices)]
    width = max(1, max_states // max(1, len(menus)))
    states, bound_s = [_State(0.0, known_s - ordered_s, -math.inf, None)], known_s
    for j, menu in enumerate(menus, start=1):
        extended = _extended(states, menu, rooms[j], [rest[j] for rest in rests], cut_s=known_s * (1 - 1e-12))
        states = _undominated(extended)
        if len(states) > width:
            states.sort(key=itemgetter(2))
            bound_s = min(bound_s, states[width].bound_s)
            del states[width:]
    best = min(states, key=itemgetter(1), default=None)
    if best is None:
        return modes, bound_s
    found, path = list(modes), best.path
    for unit in reversed(memory.order):
        assert path is not None
        found[unit], path = path
    return tuple(found), min(bound_s, best.time_s)


def _rests(menus: Sequence[Sequence[_Option]], price: Price, rooms: Sequence[float]) -> list[tuple[float, float]]:
    """For each j: the price of what is kept by then, and the bound's share of all that comes after."""
    rest_s, rests = 0.0, []
    for j in range(len(menus), -1, -1):
        s_per_byte = price.s_per_byte if j < price.num_units else 0.0
        if j == price.num_units - 1:
            rest_s -= s_per_byte * rooms[price.num_units]
        if j < len(menus):
            rest_s += min(option.time_s + s_per_byte * option.kept_bytes for option in menus[j])
        rests.append((s_per_byte, rest_s))
    return rests[::-1]


def _extended(
    states: Sequence[_State],
    menu: Sequence[_Option],
    room_bytes: float,
    rests: Sequence[tuple[float, float]],
    *,
    cut_s: float,
) -> list[_State]:
    """All that fits and may be faster than ``cut_s``, with one more unit."""
    extended = []
    for kept_bytes, before_s, _, path in states:
        for option_bytes, option_s, mode in menu:
            total_bytes, time_s = kept_bytes + option_bytes, before_s + option_s
            if total_bytes > room_bytes:
                continue
            bound_s = max(time_s + price * total_bytes + rest_s for price, rest_s in rests)
            if bound_s < cut_s:
                extended.append(_State(total_bytes, time_s, bound_s, (mode, path)))
    return extended


def _undominated(states: list[_State]) -> list[_State]:
    states.sort(key=itemgetter(0, 1))
    kept, least_s = [], math.inf
    for state in states:
        if state.time_s < least_s:
            kept.append(state)
            least_s = state.time_s
    return kept
