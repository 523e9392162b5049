"""One micro-batch size with the best that was found for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_osdp.assign import Assignment, Setting, bound_later_s


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One micro-batch size with its best assignment."""

    setting: Setting
    assignment: Assignment
    bounds: tuple[tuple[Setting, float], ...]
    """All settings that were tried, each with the seconds that no modes of it go below."""

    @property
    def samples_per_s(self) -> float:
        """Equation 1's objective: samples of all ranks over the step time."""
        return samples_per_s(self.setting, self.assignment.step_time_s)

    @property
    def most_samples_per_s(self) -> float:
        """What no modes exceed at this size."""
        return max(samples_per_s(setting, bound_s) for setting, bound_s in self.bounds)

    def most_later(self, micro_batch_size: int) -> float:
        """What no modes exceed at any larger size up to this one."""
        size = micro_batch_size
        later = ((setting.at(size), bound_later_s(setting, s, micro_batch_size=size)) for setting, s in self.bounds)
        return max(samples_per_s(setting, bound_s) for setting, bound_s in later)


def samples_per_s(setting: Setting, step_time_s: float) -> float:
    """Of all ranks, where an optimizer step takes so long."""
    samples = setting.workload.num_samples * setting.cluster.world_size
    return samples / step_time_s if step_time_s > 0 else math.inf
