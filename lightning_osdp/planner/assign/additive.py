"""The problem that the solvers are for: seconds that add up over units, under the nested constraints of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_osdp.core.axes import Treatment
from lightning_osdp.planner.cost import StepMemory

Modes = tuple[Treatment, ...]
"""One mode per unit."""


NO_GAIN = 1e-9
"""Fraction of the step time below which nothing is saved."""


def sum_s(constant_s: float, times_s: Sequence[Mapping[Treatment, float]], modes: Sequence[Treatment]) -> float:
    """Seconds with these modes, one per unit, where they add up."""
    return constant_s + sum(of_unit[mode] for of_unit, mode in zip(times_s, modes, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Additive:
    """Units with the seconds of each option: a whole step, or what bounds it from below."""

    options: tuple[Modes, ...]
    """Modes that each unit may take, least memory first."""
    times_s: Sequence[Mapping[Treatment, float]]
    """Seconds of each unit in each mode."""
    constant_s: float
    """Seconds that no mode changes."""
    memory: StepMemory

    def time_s(self, modes: Sequence[Treatment]) -> float:
        """Seconds with these modes, one per unit."""
        return sum_s(self.constant_s, self.times_s, modes)

    @cached_property
    def fastest_modes(self) -> Modes:
        """The fastest option of every unit, as if memory were no concern."""
        return tuple(
            min(options, key=times_s.__getitem__) for options, times_s in zip(self.options, self.times_s, strict=True)
        )

    @cached_property
    def fastest_s(self) -> float:
        """Seconds if memory were no concern."""
        return self.time_s(self.fastest_modes)

    @property
    def least_memory_modes(self) -> Modes:
        """The first option of every unit."""
        return tuple(options[0] for options in self.options)
