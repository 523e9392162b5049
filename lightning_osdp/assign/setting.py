"""Everything that is fixed while modes are chosen, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import DP, MODES, ZDP, ShardingMode
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost import Cost, PeakMemory, StepMemory, Workload, step_memory, unit_cost

Modes = tuple[ShardingMode, ...]
"""One mode per unit."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Model, cluster and workload, with the time and the memory of every choice of modes."""

    profile: ModelProfile
    units: tuple[UnitProfile, ...]
    cluster: Cluster
    workload: Workload
    modes: tuple[str, ...] = tuple(MODES)
    backward_prefetch: str = "pre"
    forward_prefetch: bool = False

    @cached_property
    def options(self) -> tuple[Modes, ...]:
        """Modes that each unit may take, least memory first; the root stays gathered whatever its mode."""
        offered = tuple(mode for name, mode in MODES.items() if name in self.modes)
        return tuple((DP,) if unit.is_root else offered for unit in self.units)

    @cached_property
    def costs(self) -> tuple[Mapping[ShardingMode, Cost], ...]:
        """Cost of each unit in every mode that there is, offered or not."""
        return tuple(
            {mode: unit_cost(unit, mode, cluster=self.cluster, workload=self.workload) for mode in MODES.values()}
            for unit in self.units
        )

    @cached_property
    def memory(self) -> StepMemory:
        """Peak of one optimizer step for every choice of modes."""
        return step_memory(
            self.profile,
            self.units,
            world_size=self.cluster.world_size,
            workload=self.workload,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=self.forward_prefetch,
        )

    @cached_property
    def constant_s(self) -> float:
        """Seconds of a step that no mode changes and no unit owns: the rest of the model, and the optimizer."""
        profile, workload = self.profile, self.workload
        trainable = sum(operator.num_trainable for operator in profile)
        return (
            workload.num_micro_batches
            * (profile.other_fixed_s + workload.micro_batch_size * profile.other_s_per_sample)
            + profile.optimizer_s_per_element * trainable / self.cluster.world_size
        )

    @cached_property
    def fastest_modes(self) -> Modes:
        """The fastest option of every unit, as if memory were no concern."""
        return tuple(
            min(options, key=lambda mode: costs[mode].time_s)
            for options, costs in zip(self.options, self.costs, strict=True)
        )

    @cached_property
    def fastest_s(self) -> float:
        """Step time if memory were no concern."""
        return self.step_time_s(self.fastest_modes)

    @property
    def least_memory_modes(self) -> Modes:
        """The first option of every unit."""
        return tuple(options[0] for options in self.options)

    @property
    def all_zdp_modes(self) -> Modes:
        """Plain FSDP, offered or not: every unit ZDP, the root gathered as ever."""
        return tuple(DP if unit.is_root else ZDP for unit in self.units)

    def saved_s(self, unit: int) -> float:
        """Seconds per optimizer step that keeping this unit gathered saves over sharding it."""
        return 0.0 if self.units[unit].is_root else self.costs[unit][ZDP].time_s - self.costs[unit][DP].time_s

    def step_time_s(self, modes: Sequence[ShardingMode]) -> float:
        """Predicted seconds of one optimizer step: equation 1's sum, and what it leaves out."""
        return self.constant_s + sum(costs[mode].time_s for costs, mode in zip(self.costs, modes, strict=True))

    def peak(self, modes: Sequence[ShardingMode]) -> PeakMemory:
        """Predicted peak of one optimizer step."""
        return self.memory.peak(modes)
