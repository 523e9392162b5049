"""Modes that violate a constraint made to fit, and modes that fit made faster, under the exact peak."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from lightning_osdp.assign.additive import Additive, Modes


def repair(problem: Additive, modes: Modes, rooms: Sequence[float]) -> Modes:
    """Moves units to their smallest option until everything fits, those first that save least time per byte.

    Going through the constraints in order, each is met before the next is looked at: O(n log n).

    Args:
        problem: what is fixed.
        modes: one per unit.
        rooms: of `StepMemory.room_bytes`; every unit's smallest option must fit.
    """
    repaired, memory = list(modes), problem.memory
    kept: list[tuple[float, int, float]] = []
    total = 0.0
    for k, (unit, num_bytes) in enumerate(zip(memory.order, memory.gathered_bytes, strict=True), start=1):
        smallest = problem.options[unit][0]
        if modes[unit].resident:
            total += num_bytes
            if not smallest.resident and num_bytes:
                times_s = problem.times_s[unit]
                heapq.heappush(kept, ((times_s[smallest] - times_s[modes[unit]]) / num_bytes, k, num_bytes))
        while total > rooms[k]:
            _, place, freed = heapq.heappop(kept)
            total -= freed
            repaired[memory.order[place - 1]] = problem.options[memory.order[place - 1]][0]
    return tuple(repaired)


def fill(problem: Additive, modes: Modes, rooms: Sequence[float]) -> Modes:
    """Moves units to faster options, most time per byte first, as long as everything fits."""
    filled, memory = list(modes), problem.memory
    upgrades = []
    for place, (unit, num_bytes) in enumerate(zip(memory.order, memory.gathered_bytes, strict=True)):
        times_s = problem.times_s[unit]
        for mode in problem.options[unit]:
            saved_s = times_s[modes[unit]] - times_s[mode]
            extra = num_bytes * (mode.resident - modes[unit].resident)
            if saved_s > 0:
                upgrades.append((saved_s / max(extra, 1.0), place, extra, mode))
    slack, taken = _slack(memory.kept_bytes(modes), rooms), 0.0
    # of equal units the last one first: it is kept for the shortest time
    for _, place, extra, mode in sorted(upgrades, key=lambda upgrade: upgrade[:2], reverse=True):
        if taken and extra > slack[place + 1] - taken:
            slack, taken = _slack(memory.kept_bytes(filled), rooms), 0.0
        if extra <= slack[place + 1] - taken:
            filled[memory.order[place]] = mode
            taken += extra
    return tuple(filled)


def _slack(kept: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """For each k, the bytes that fit besides under its constraint and all later ones."""
    left = [room - num_bytes for room, num_bytes in zip(rooms, kept, strict=True)]
    return list(accumulate(reversed(left), min))[::-1]
