"""Knapsacks with one constraint, made of the units of a problem with many, and their solutions as modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from lightning_osdp.assign.additive import Additive, Modes
from lightning_osdp.search import Choice, Group, Problem, Solution

Solver: TypeAlias = Callable[[Problem], Solution]
_Key: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Knapsack:
    """A `search.Problem` whose times and bytes are those beyond each unit's fastest and smallest option."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]
    """Units of each group; later ones last, for they take the larger choices: they are kept for a shorter time."""
    options: tuple[Modes, ...]

    def modes(self, solution: Solution) -> Modes:
        """One mode per unit, as a solution says."""
        modes = [options[0] for options in self.options]
        for units, counts in zip(self.members, solution.counts, strict=True):
            taken = [option for option, count in enumerate(counts) for _ in range(count)]
            for unit, option in zip(units, taken, strict=True):
                modes[unit] = self.options[unit][option]
        return tuple(modes)


def prefix_knapsack(problem: Additive, num_units: int, room_bytes: float) -> Knapsack:
    """Bytes are limited only where the first units that forward leaves are freed: a relaxation.

    Args:
        problem: all constraints, of which one is kept.
        num_units: k of `StepMemory`.
        room_bytes: bytes that units may hold then.
    """
    memory = problem.memory
    others = sorted(set(range(len(problem.options))) - set(memory.order))
    members: dict[_Key, list[int]] = {}
    choices: dict[_Key, tuple[Choice, ...]] = {}
    least_bytes = 0.0
    for unit in (*others, *memory.order):
        options, times_s = problem.options[unit], problem.times_s[unit]
        held = [memory.held_at(num_units, memory.places.get(unit), mode) for mode in options]
        smallest, fastest_s = held[0], min(times_s[mode] for mode in options)
        least_bytes += smallest
        beyond = [
            (times_s[mode] - fastest_s, num_bytes - smallest) for mode, num_bytes in zip(options, held, strict=True)
        ]
        # Equal units differ by the rounding of sums: in the ninth digit of a time, in a thousandth of a byte.
        key = tuple((float(f"{time_s:.9g}"), round(num_bytes, 3)) for time_s, num_bytes in beyond)
        members.setdefault(key, []).append(unit)
        choices.setdefault(key, tuple(Choice(*choice) for choice in beyond))
    groups = tuple(Group(choices=choices[key], count=len(units)) for key, units in members.items())
    return Knapsack(
        problem=Problem(groups=groups, budget_bytes=max(0.0, room_bytes - least_bytes)),
        members=tuple(map(tuple, members.values())),
        options=problem.options,
    )
