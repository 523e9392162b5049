"""Modes that violate a constraint made to fit, and modes that fit made faster, under the exact peak."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from lightning_osdp.assign.additive import Additive, Modes
from lightning_osdp.core.modes import ShardingMode


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


def _less_what_stays(problem: Additive, modes: list[ShardingMode], rooms: Sequence[float]) -> list[float]:
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
    # of equal units the last one first: it is kept for the shortest time
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
    """Whether there is room for so many more bytes before the unit is left, and once it is."""
    return before <= max(0.0, slack[0] - taken) and after <= max(0.0, slack[place + 1] - taken)


def _slack(kept: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """For each k, the bytes that fit besides under its constraint and all later ones."""
    left = [room - num_bytes for room, num_bytes in zip(rooms, kept, strict=True)]
    return list(accumulate(reversed(left), min))[::-1]
