"""The search for modes: additive where nothing overlaps, from there on by simulation where something does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_osdp.assign.additive import Modes
from lightning_osdp.assign.overlap import solve_overlapped
from lightning_osdp.assign.paths import Paths
from lightning_osdp.assign.setting import Setting
from lightning_osdp.assign.slices import one_sync
from lightning_osdp.assign.solve import solve
from lightning_osdp.assign.spare import fill_spare
from lightning_osdp.cost import PeakMemory


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Modes aligned with the units, with what they are predicted to cost."""

    modes: Modes
    step_time_s: float
    peak: PeakMemory
    bound_s: float
    """No assignment that fits by the closed form of `StepMemory` has a smaller step time."""
    note: str = ""

    @property
    def gap(self) -> float:
        """``step_time_s / bound_s - 1``."""
        return max(0.0, self.step_time_s / self.bound_s - 1) if self.bound_s > 0 else 0.0


def assign_modes(
    setting: Setting, *, limit_bytes: int, search: str = "depth_first", worth_s: float = math.inf
) -> Assignment | None:
    """The fastest assignment found whose peak fits, with a bound on all of them; None if none fits.

    Args:
        setting: model, units, cluster and workload.
        limit_bytes: the most bytes that may live on one rank.
        search: name of a solver in ``search.SOLVERS``.
        worth_s: a step time that is of no use: where none below it is possible, the modes are not improved further.
    """
    if setting.peak(setting.least_memory_modes).peak_bytes > limit_bytes:
        return None
    rooms = setting.memory.room_bytes(limit_bytes)
    if setting.overlaps:
        solved = solve_overlapped(setting, rooms, search=search, worth_s=worth_s)
    else:
        solved = solve(setting.additive, rooms, search=search)
    modes = one_sync(setting, fill_spare(setting, solved.modes, rooms, limit_bytes=limit_bytes))
    return Assignment(
        modes=modes,
        step_time_s=solved.time_s if modes == solved.modes else setting.step_time_s(modes),
        peak=setting.exact_peak(modes),
        bound_s=solved.bound_s,
        note=solved.note,
    )


def bound_later_s(setting: Setting, bound_s: float, *, micro_batch_size: int) -> float:
    """Seconds that no modes go below at a larger micro-batch, where no fewer bytes are needed.

    Where nothing overlaps, each choice of modes takes so much longer as there is more to compute. Where something does,
    none takes less than before, nor less than the paths of the larger micro-batch.

    Args:
        setting: at the smaller micro-batch.
        bound_s: seconds that no modes which fit go below there.
        micro_batch_size: the larger one.
    """
    later = setting.at(micro_batch_size)
    if setting.overlaps:
        return max(bound_s, Paths(later).least_s())
    return bound_s + later.compute_s - setting.compute_s
