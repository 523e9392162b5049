"""Modes for seconds that add up: relaxations for the bound, repaired for the plan."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from lightning_osdp.core.axes import Treatment
from lightning_osdp.planner.assign.additive import Additive, Modes
from lightning_osdp.planner.assign.nested import Price, improve
from lightning_osdp.planner.search import SOLVERS, Choice, Group, Problem, Solution
from lightning_osdp.planner.search.bound import relax

MAX_RELAXATIONS = 4
"""Constraints that are relaxed to, one after the other: rarely does a fifth one make a plan or a better bound."""

ROUNDING = 1e-12
"""Step times that differ by less than this fraction are equal."""

MOST_EXACT = 300
"""Options of all units together beyond which modes within `NEAR` of the bound are not improved: that takes seconds in
the search of one plan."""

NEAR = 1e-4
"""Fraction of a step time that is worth no search where there are many options."""

MAX_EXTENDED = 200_000
"""States that `nested.improve` makes of others at most, one for each option: up to 1 s in CPython 3.11."""

MIN_WIDTH = 100
"""States per unit below which it is not tried: where all units together have more than two thousand options."""


class Solved(NamedTuple):
    """Modes that fit."""

    modes: Modes
    time_s: float
    bound_s: float
    """Seconds that no modes that fit go below; the time itself where it is proven."""
    note: str = ""


def solve(
    problem: Additive,
    rooms: Sequence[float],
    *,
    search: str,
    tolerance: float = ROUNDING,
    max_extended: int = MAX_EXTENDED,
) -> Solved:
    """The fastest modes found, with a bound on all of them.

    Args:
        problem: seconds of every option.
        rooms: of `StepMemory.room_bytes`; every unit's smallest option must fit.
        search: name of a solver in ``search.SOLVERS``.
        tolerance: a gap that is as good as none.
        max_extended: states that `nested.improve` may make.
    """
    relaxed = _relaxed(problem, rooms, SOLVERS[search])
    bound_s = max([problem.fastest_s, *(problem.fastest_s + each.solution.bound_s for each in relaxed)])
    proposals = [problem.fastest_modes, *(each.modes for each in relaxed)]
    if violated(problem, proposals[-1], rooms) is not None:
        proposals.append(problem.least_memory_modes)
    best = min((fill(problem, repair(problem, modes, rooms), rooms) for modes in proposals), key=problem.time_s)
    time_s = problem.time_s(best)
    num_options = sum(map(len, problem.options))
    width = max_extended // num_options
    if num_options > MOST_EXACT:
        tolerance = max(tolerance, NEAR)
    if search != "greedy" and width >= MIN_WIDTH and time_s > bound_s * (1 + tolerance):
        prices = [each.price for each in relaxed]
        best, nested_s = improve(problem, best, rooms, prices=prices, width=width)
        time_s, bound_s = problem.time_s(best), max(bound_s, nested_s)
    if time_s <= bound_s * (1 + ROUNDING):
        return Solved(best, time_s, bound_s=time_s)
    return Solved(best, time_s, bound_s, _note([each.solution for each in relaxed]))


def _note(solutions: list[Solution]) -> str:
    """Note on a search that was cut short, without its times, which are not a step's."""
    stopped = [solution for solution in solutions if solution.is_cut_short]
    if not stopped:
        return ""
    nodes = max(solution.num_nodes for solution in stopped)
    return f"depth_first stopped after {nodes:,} nodes: the best plan that was found, not proven to be the best."


class _Relaxed(NamedTuple):
    """Solution with one constraint."""

    solution: Solution
    modes: Modes
    price: Price


def _relaxed(problem: Additive, rooms: Sequence[float], solver: Callable[[Problem], Solution]) -> list[_Relaxed]:
    """Solutions with one constraint each: with what the last one violates most, until nothing is violated."""
    relaxed: dict[int, _Relaxed] = {}
    modes = problem.fastest_modes
    while len(relaxed) < MAX_RELAXATIONS:
        k = violated(problem, modes, rooms)
        if k is None or k in relaxed:
            break
        knapsack, members = _knapsack(problem, k, rooms[k])
        solution = solver(knapsack)
        modes = _modes(problem, members, solution)
        relaxed[k] = _Relaxed(solution, modes, Price(k, relax(knapsack).price))
    return list(relaxed.values())


def violated(problem: Additive, modes: Modes, rooms: Sequence[float]) -> int | None:
    """The k of the constraint that these modes exceed by most; None where they fit."""
    excess = [kept - room for kept, room in zip(problem.memory.kept_bytes(modes), rooms, strict=True)]
    k = max(range(len(excess)), key=excess.__getitem__)
    return k if excess[k] > 0 else None


def _knapsack(problem: Additive, k: int, room_bytes: float) -> tuple[Problem, list[list[int]]]:
    """A relaxation: bytes are limited only where the first k units that forward leaves are freed.

    Times and bytes are those beyond each unit's fastest and smallest option. With it come the units of each group;
    later ones last, for they take the larger choices: they are kept for a shorter time.
    """
    memory = problem.memory
    others = sorted(set(range(len(problem.options))) - set(memory.order))
    members: dict[tuple[tuple[float, float], ...], list[int]] = {}
    groups: dict[tuple[tuple[float, float], ...], tuple[Choice, ...]] = {}
    least_bytes = 0.0
    for unit in (*others, *memory.order):
        options, times_s = problem.options[unit], problem.times_s[unit]
        held = [memory.held_at(k, unit, mode) for mode in options]
        smallest, fastest_s = held[0], min(times_s[mode] for mode in options)
        least_bytes += smallest
        beyond = [
            (times_s[mode] - fastest_s, num_bytes - smallest) for mode, num_bytes in zip(options, held, strict=True)
        ]
        # Equal units differ by the rounding of sums: in the ninth digit of a time, in a thousandth of a byte.
        key = tuple((float(f"{time_s:.9g}"), round(num_bytes, 3)) for time_s, num_bytes in beyond)
        members.setdefault(key, []).append(unit)
        groups.setdefault(key, tuple(Choice(*choice) for choice in beyond))
    return Problem(
        groups=tuple(Group(choices=groups[key], count=len(units)) for key, units in members.items()),
        budget_bytes=max(0.0, room_bytes - least_bytes),
    ), [*members.values()]


def _modes(problem: Additive, members: Sequence[Sequence[int]], solution: Solution) -> Modes:
    """Modes, one per unit, as a solution says."""
    modes = [options[0] for options in problem.options]
    for units, counts in zip(members, solution.counts, strict=True):
        taken = [option for option, count in enumerate(counts) for _ in range(count)]
        for unit, option in zip(units, taken, strict=True):
            modes[unit] = problem.options[unit][option]
    return tuple(modes)


def repair(problem: Additive, modes: Modes, rooms: Sequence[float]) -> Modes:
    """Moves units to their smallest option until everything fits, those first that save least time per byte.

    First those that hold bytes from one micro-batch to the next, which count under every constraint. Then, going
    through the constraints in order, each is met before the next is looked at: O(n log n). Every unit's smallest option
    must fit.
    """
    repaired, memory = list(modes), problem.memory
    rooms = _less_what_stays(problem, repaired, rooms)
    kept: list[tuple[float, int, float]] = []
    total = 0.0
    for k, unit in enumerate(memory.order, start=1):
        mode, smallest = repaired[unit], problem.options[unit][0]
        num_bytes, least = (memory.held(k - 1, each).prefix_bytes for each in (mode, smallest))
        total += num_bytes
        if num_bytes > least:
            lost_s = problem.times_s[unit][smallest] - problem.times_s[unit][mode]
            heapq.heappush(kept, (lost_s / (num_bytes - least), k, num_bytes - least))
        while total > rooms[k]:
            _, place, freed = heapq.heappop(kept)
            total -= freed
            repaired[memory.order[place - 1]] = problem.options[memory.order[place - 1]][0]
    return tuple(repaired)


def _less_what_stays(problem: Additive, modes: list[Treatment], rooms: Sequence[float]) -> list[float]:
    """Room for what is held within a micro-batch; drops from the modes what there is no room for between two."""
    memory, losses, stays = problem.memory, [], 0.0
    least = memory.kept_bytes(problem.least_memory_modes)
    for place, unit in enumerate(memory.order):
        smallest, times_s = problem.options[unit][0], problem.times_s[unit]
        held, fewest = memory.held(place, modes[unit]).window_bytes, memory.held(place, smallest).window_bytes
        stays += held
        if held > fewest:
            losses.append(((times_s[smallest] - times_s[modes[unit]]) / (held - fewest), -place, held - fewest))
    most = min(room - num_bytes for room, num_bytes in zip(rooms, least, strict=True)) + least[0]
    for _, place, num_bytes in sorted(losses):
        if stays <= most:
            break
        stays -= num_bytes
        modes[memory.order[-place]] = problem.options[memory.order[-place]][0]
    return [room - stays for room in rooms]


def fill(problem: Additive, modes: Modes, rooms: Sequence[float]) -> Modes:
    """Moves units to faster options, most time per byte first, as long as everything fits."""
    filled, memory = list(modes), problem.memory
    upgrades = []
    for place, unit in enumerate(memory.order):
        times_s, now = problem.times_s[unit], memory.held(place, modes[unit])
        for mode in problem.options[unit]:
            held, saved_s = memory.held(place, mode), times_s[modes[unit]] - times_s[mode]
            if saved_s > 0:
                upgrades.append((saved_s / max(sum(held) - sum(now), 1.0), place, mode))
    slack, taken = _slack(memory.kept_bytes(modes), rooms), 0.0
    # the last one of equal units first: it is kept for the shortest time
    for _, place, mode in sorted(upgrades, key=lambda upgrade: upgrade[:2], reverse=True):
        unit = memory.order[place]
        if problem.times_s[unit][mode] >= problem.times_s[unit][filled[unit]]:
            continue
        now, held = memory.held(place, filled[unit]), memory.held(place, mode)
        before = held.window_bytes - now.window_bytes
        after = before + held.prefix_bytes - now.prefix_bytes
        if taken and not _fits(before, after, slack, place, taken):
            slack, taken = _slack(memory.kept_bytes(filled), rooms), 0.0
        if _fits(before, after, slack, place, taken):
            filled[unit] = mode
            taken += max(before, after, 0.0)
    return tuple(filled)


def _fits(before: float, after: float, slack: Sequence[float], place: int, taken: float) -> bool:
    """True where there is room for so many more bytes before the unit is left, and once it is."""
    return before <= max(0.0, slack[0] - taken) and after <= max(0.0, slack[place + 1] - taken)


def _slack(kept: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """Bytes that fit besides under constraint k and all later ones, for each k."""
    left = [room - num_bytes for room, num_bytes in zip(rooms, kept, strict=True)]
    return list(accumulate(reversed(left), min))[::-1]
