"""Modes where communication overlaps computing: from additive solutions by local search, accepted by simulation only.

The least communication that fits is nearly the least time where the links are busiest, and where computing is, nearly
any modes will do. In between it matters where communication falls: units for which computing waits are kept, alone or
in place of others, and of equal units the first or evenly spread ones are tried in place of the last ones. Units that
may move activations are tried either way, one by one. In the end units that are kept for nothing are freed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from lightning_osdp.core.axes import Treatment
from lightning_osdp.planner.assign.additive import NO_GAIN, Additive, Modes
from lightning_osdp.planner.assign.paths import Path, Paths
from lightning_osdp.planner.assign.setting import Setting
from lightning_osdp.planner.assign.solve import MAX_EXTENDED, Solved, fill, repair, solve, violated
from lightning_osdp.planner.cost import StepMemory
from lightning_osdp.planner.engine import effects_of

MAX_PATHS = 4
"""Paths that are bounded, one after the other: those that take longest in the modes found so far."""

MAX_SIMULATED_UNITS = 100_000
"""Units in all steps that the local search simulates: about half a second."""

RESIDENT_UNITS = 4
"""Units that one counts as where some may be resident: such steps take as many times longer to simulate."""

MAX_STALLED = 8
"""Units for which computing waits longest, among which a move is looked for."""

MAX_FREED = 32
"""Groups of units that are freed to see whether they are kept for nothing, each time."""

MAX_EXCHANGED = 8
"""Units, the nearest ones, that each of them may take the place of."""

ENOUGH = 1e-3
"""A gap that is as good as none: it ends the search."""


def solve_overlapped(
    setting: Setting, rooms: Sequence[float], *, search: str, worth_s: float, before: Solved | None
) -> Solved:
    """Fastest modes found where the cluster overlaps; modes that cannot be faster than ``worth_s`` are not improved.

    The search goes on from modes found ``before`` with more room; their bound holds with less room, too.
    """
    incumbent = _Incumbent(setting, rooms)
    if before is None:
        first = solve(setting.costs.additive, rooms, search="greedy")
        incumbent.offer(first.modes)
        bound_s = _bound_s(
            setting,
            setting.costs.memory,
            rooms,
            search,
            enough_s=worth_s,
            best=lambda: incumbent.modes,
            offer=incumbent.offer,
        )
        # better additive modes take less by no more than what these take above their bound
        if bound_s < worth_s and incumbent.time_s - (first.time_s - first.bound_s) < worth_s:
            incumbent.offer(_improved(setting.costs.additive, rooms, search, first).modes)
    else:
        repaired = repair(incumbent.problem, before.modes, rooms)
        for modes in (repaired, fill(incumbent.problem, repaired, rooms)):
            incumbent.offer(modes)
        bound_s = before.bound_s
    while bound_s < worth_s:
        _free(incumbent)
        if incumbent.time_s <= bound_s * (1 + ENOUGH):
            break
        if not any(incumbent.improve(moves(incumbent)) for moves in (_relieved, _replaced, _moved)):
            break
    return Solved(modes=incumbent.modes, time_s=incumbent.time_s, bound_s=min(bound_s, incumbent.time_s))


def bound_overlapped(
    setting: Setting, memory: StepMemory, rooms: Sequence[float], modes: Modes, *, search: str, enough_s: float
) -> float:
    """Seconds that no modes go below that fit in this memory, by paths that are long with these modes, or enough."""
    return _bound_s(setting, memory, rooms, search, enough_s=enough_s, best=lambda: modes, offer=lambda _: None)


def _improved(problem: Additive, rooms: Sequence[float], search: str, first: Solved) -> Solved:
    """Solution to `ENOUGH`: for many different units the near-instant solver does, whose solution comes first.

    All paths of one search together may take as long as one additive solution.
    """
    if first.time_s <= first.bound_s * (1 + ENOUGH):
        return first
    return solve(problem, rooms, search=search, tolerance=ENOUGH, max_extended=MAX_EXTENDED // (1 + MAX_PATHS))


def _bound_s(
    setting: Setting,
    memory: StepMemory,
    rooms: Sequence[float],
    search: str,
    *,
    enough_s: float,
    best: Callable[[], Modes],
    offer: Callable[[Modes], object],
) -> float:
    """Largest bound of a few paths, no better than is enough.

    Args:
        setting: whose modes are bounded.
        memory: that they must fit in.
        rooms: bytes that units may hold of it.
        search: name of a solver.
        enough_s: bound from which on a path is left to the near-instant solver.
        best: returns the best modes so far.
        offer: is given modes that make a path short.
    """
    paths, tried, bound_s = Paths(setting), set[Path](), 0.0

    def solved_modes(problem: Additive) -> Modes:
        nonlocal bound_s
        problem = dataclasses.replace(problem, memory=memory)
        solved = solve(problem, rooms, search="greedy")
        if solved.bound_s < enough_s and solved.time_s > bound_s:  # else its bound is not the largest
            solved = _improved(problem, rooms, search, solved)
        bound_s = max(bound_s, solved.bound_s)
        offer(solved.modes)
        return solved.modes

    latest = best()
    while len(tried) < MAX_PATHS and bound_s < enough_s:
        path = next((each for each in map(paths.longest, (best(), latest)) if each not in tried), None)
        if path is None:
            break
        tried.add(path)
        latest = solved_modes(paths.at(path))
    for mean in paths.means if bound_s < enough_s else ():
        solved_modes(mean)
    return bound_s


class _Incumbent:
    """The best modes so far, and the number of modes that may still be simulated."""

    def __init__(self, setting: Setting, rooms: Sequence[float]) -> None:
        self.setting, self.rooms, self.problem = setting, rooms, setting.costs.additive
        self.modes: Modes = self.problem.least_memory_modes
        self.time_s, self.stalls_s = setting.costs.clock.step(self.modes)
        may_stay = any(effects_of(mode).is_passed_over for options in self.problem.options for mode in options)
        self.num_left = MAX_SIMULATED_UNITS // (len(setting.units) * (RESIDENT_UNITS if may_stay else 1))

    def offer(self, modes: Modes, *, slack: float = -NO_GAIN) -> bool:
        """Takes modes that fit if they are faster, or slower by at most a fraction; returns True where they were."""
        self.num_left -= 1
        step = self.setting.costs.clock.step(modes)
        is_taken = step.time_s < self.time_s * (1 + slack)
        if is_taken:
            self.modes, (self.time_s, self.stalls_s) = modes, step
        return is_taken

    def improve(self, moves: Iterable[Modes]) -> bool:
        """Takes the first modes that fit and are faster; returns True where there were any."""
        return any(
            self.num_left > 0 and violated(self.problem, modes, self.rooms) is None and self.offer(modes)
            for modes in moves
        )

    def with_modes(self, changed: Mapping[int, Treatment]) -> Modes:
        """The best modes with others for some units."""
        return tuple(changed.get(unit, mode) for unit, mode in enumerate(self.modes))

    def kept(self, unit: int) -> Modes:
        """Options with the least communication: of those over all ranks, and of all."""
        options, times_s = self.problem.options[unit][::-1], self.problem.times_s[unit]
        over_all = [mode for mode in options if effects_of(mode).sharded_over == "all"]
        fastest = (min(each, key=times_s.__getitem__) for each in (over_all, options) if each)
        return tuple(dict.fromkeys(fastest))


def _relieved(incumbent: _Incumbent) -> Iterator[Modes]:
    """Yields modes that keep a unit that computing waits for, or the one gathered before: also, or in exchange."""
    options, modes, order = incumbent.problem.options, incumbent.modes, incumbent.problem.memory.order
    places = [place for place, unit in enumerate(order) if incumbent.stalls_s.get(unit, 0.0) > 0]
    places.sort(key=lambda place: -incumbent.stalls_s[order[place]])
    near = dict.fromkeys(each for place in places[:MAX_STALLED] for each in (place, place + 1) if each < len(order))
    freed = [(place, mode) for place in near for mode in incumbent.kept(order[place]) if mode != modes[order[place]]]
    for place, mode in freed:
        yield incumbent.with_modes({order[place]: mode})
    kept = [place for place, unit in enumerate(order) if modes[unit] is not options[unit][0]]
    for place, mode in freed:
        for _, other in sorted((abs(other - place), order[other]) for other in kept)[:MAX_EXCHANGED]:
            yield incumbent.with_modes({order[place]: mode} | {other: options[other][0]})


def _replaced(incumbent: _Incumbent) -> Iterator[Modes]:
    """Yields modes that fill the room; then modes that keep the first of equal units, or evenly spread ones."""
    problem, modes = incumbent.problem, incumbent.modes
    yield fill(problem, modes, incumbent.rooms)
    groups: dict[tuple[object, ...], list[int]] = {}
    for unit, num_bytes in zip(problem.memory.order, problem.memory.gathered_bytes, strict=True):
        seconds = (problem.times_s[unit][mode] for mode in problem.options[unit])
        groups.setdefault((num_bytes, *seconds), []).append(unit)
    for units in groups.values():
        count = sum(modes[unit] is not problem.options[unit][0] for unit in units)
        if 0 < count < len(units):
            for chosen in (units[:count], [units[index * len(units) // count] for index in range(count)]):
                for way in range(max(len(incumbent.kept(unit)) for unit in chosen)):
                    kept = {unit: incumbent.kept(unit)[way % len(incumbent.kept(unit))] for unit in chosen}
                    yield incumbent.with_modes({unit: problem.options[unit][0] for unit in units} | kept)


def _moved(incumbent: _Incumbent) -> Iterator[Modes]:
    """Yields modes in which one unit moves activations in place of weights, or weights in place of activations."""
    for unit, options in enumerate(incumbent.problem.options):
        for mode in options:
            if effects_of(mode).exchanges != effects_of(incumbent.modes[unit]).exchanges:
                yield incumbent.with_modes({unit: mode})


def _free(incumbent: _Incumbent) -> None:
    """Frees units that are kept for nothing: all of them, or one half and then the other, and so on."""
    kept = [unit for unit, options in enumerate(incumbent.problem.options) if incumbent.modes[unit] is not options[0]]
    chunks, num_left = [kept] if kept else [], incumbent.num_left - MAX_FREED
    while chunks and incumbent.num_left > max(0, num_left):
        chunk = chunks.pop()
        freed = incumbent.with_modes({unit: incumbent.problem.options[unit][0] for unit in chunk})
        if not incumbent.offer(freed, slack=NO_GAIN) and len(chunk) > 1:
            middle = len(chunk) // 2
            chunks += [chunk[middle:], chunk[:middle]]
