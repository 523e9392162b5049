"""Knapsacks with one constraint, made of the units of a `Setting`, and their solutions as modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_osdp.assign.setting import Modes, Setting
from lightning_osdp.cost import largest_transient_bytes
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


def prefix_knapsack(setting: Setting, num_units: int, room_bytes: float) -> Knapsack:
    """Only the first units that forward leaves are limited, and only together: a relaxation.

    Args:
        setting: what is fixed.
        num_units: k of `StepMemory`.
        room_bytes: bytes that the first k units may keep.
    """
    option_bytes = [[0.0] * len(options) for options in setting.options]
    memory = setting.memory
    for unit, num_bytes in zip(memory.order[:num_units], memory.gathered_bytes, strict=False):
        option_bytes[unit] = [num_bytes * mode.resident for mode in setting.options[unit]]
    return _knapsack(setting, option_bytes, room_bytes)


def paper_knapsack(setting: Setting, limit_bytes: int) -> Knapsack:
    """m_ZDP and m_DP add up to the limit less the largest transient: neither a relaxation nor always a plan.

    References:
        OSDP (Jiang et al. 2022), equation 1.
    """
    profile, workload = setting.profile, setting.workload
    option_bytes = [
        [costs[mode].memory_bytes for mode in options]
        for options, costs in zip(setting.options, setting.costs, strict=True)
    ]
    besides = (
        largest_transient_bytes(profile, setting.units, world_size=setting.cluster.world_size, workload=workload)
        + profile.buffer_bytes
        + profile.batch_bytes_per_sample * workload.micro_batch_size
    )
    return _knapsack(setting, option_bytes, limit_bytes - besides)


def _knapsack(setting: Setting, option_bytes: Sequence[Sequence[float]], budget_bytes: float) -> Knapsack:
    members: dict[_Key, list[int]] = {}
    choices: dict[_Key, tuple[Choice, ...]] = {}
    ordered = setting.memory.order
    for unit in (*sorted(set(range(len(setting.units))) - set(ordered)), *ordered):
        times_s = [setting.costs[unit][mode].time_s for mode in setting.options[unit]]
        fastest_s, smallest = min(times_s), min(option_bytes[unit])
        beyond = [
            (time_s - fastest_s, num_bytes - smallest)
            for time_s, num_bytes in zip(times_s, option_bytes[unit], strict=True)
        ]
        # Equal units differ by the rounding of sums: in the ninth digit of a time, in a thousandth of a byte.
        key = tuple((float(f"{time_s:.9g}"), round(num_bytes, 3)) for time_s, num_bytes in beyond)
        members.setdefault(key, []).append(unit)
        choices.setdefault(key, tuple(Choice(*choice) for choice in beyond))
    groups = tuple(Group(choices=choices[key], count=len(units)) for key, units in members.items())
    spare_bytes = budget_bytes - sum(map(min, option_bytes))
    return Knapsack(
        problem=Problem(groups=groups, budget_bytes=max(0.0, spare_bytes)),
        members=tuple(map(tuple, members.values())),
        options=setting.options,
    )
