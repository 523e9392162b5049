"""The Scheduler of the paper: sweeps micro-batch sizes, has modes assigned for each, keeps the best samples/s.

(Lightning uses the word for learning rates; here it always means the choice of the micro-batch size.)

References:
    OSDP (Jiang et al. 2022), equation 1 and algorithm 1. Deviation: the paper tries b = 1, 2, 3, ...; here sizes are
    bracketed by doubling up to the first that does not fit, and refined around the best.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from lightning_osdp.assign import Assignment, Setting, assign_modes
from lightning_osdp.core.byte_size import format_bytes
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plan import Plan, Unit
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.search_space import SearchSpace
from lightning_osdp.core.units import partition
from lightning_osdp.cost import Workload
from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.search import SOLVERS


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """One micro-batch size with its best assignment."""

    setting: Setting
    assignment: Assignment

    @property
    def samples_per_s(self) -> float:
        """Equation 1's objective: samples of all ranks over the step time."""
        workload = self.setting.workload
        samples = workload.micro_batch_size * workload.num_micro_batches * self.setting.cluster.world_size
        step_time_s = self.assignment.step_time_s
        return samples / step_time_s if step_time_s > 0 else math.inf


def make_plan(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    memory_limit_bytes: int,
    micro_batch_size: int | Literal["scale"],
    max_micro_batch_size: int | None = None,
    num_micro_batches: int = 1,
    search: str = "depth_first",
    search_space: SearchSpace | None = None,
    backward_prefetch: str = "pre",
    forward_prefetch: bool = False,
) -> Plan:
    """The plan with the best predicted samples/s under the memory limit.

    Args:
        profile: the model, see `profile_model`.
        cluster: ranks and links, see `measure_cluster`.
        memory_limit_bytes: most bytes of live tensors on one rank, in every phase of a step.
        micro_batch_size: samples per rank and micro-batch, or ``"scale"`` to sweep it.
        max_micro_batch_size: largest size that ``"scale"`` may choose; None: as far as memory allows, at most 2^20.
        num_micro_batches: micro-batches per optimizer step (gradient accumulation).
        search: name of a solver: ``depth_first``, ``greedy`` or ``exhaustive``.
        search_space: what may be chosen; None: everything.
        backward_prefetch: FSDP1's setting, ``pre``, ``post`` or ``none``; it decides how many units are gathered.
        forward_prefetch: FSDP1's setting.

    Raises:
        ConfigurationError: no such solver, or a size below 1.
        InfeasibleError: no plan fits; the text says what would.
    """
    if search not in SOLVERS:
        raise ConfigurationError(f"search must be one of {tuple(SOLVERS)}, got {search!r}.")
    if micro_batch_size != "scale" and micro_batch_size < 1:
        raise ConfigurationError(f"The micro-batch must hold at least one sample, got {micro_batch_size!r}.")
    search_space = search_space or SearchSpace()
    first = Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=search_space.min_unit_bytes),
        cluster=cluster,
        workload=Workload(
            micro_batch_size=1 if micro_batch_size == "scale" else micro_batch_size,
            num_micro_batches=num_micro_batches,
        ),
        modes=search_space.modes,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
    )
    sweep = _Sweep(first, limit_bytes=memory_limit_bytes, search=search)
    if micro_batch_size == "scale":
        best = sweep.best(max_micro_batch_size or 2**20)
    else:
        best = sweep.candidate(micro_batch_size)
    if best is None:
        raise InfeasibleError(_why_infeasible(first, sweep, memory_limit_bytes))
    return _plan(best, memory_limit_bytes, search)


class _Sweep:
    """Candidates by micro-batch size, each searched once."""

    def __init__(self, setting: Setting, *, limit_bytes: int, search: str) -> None:
        self._setting, self._limit_bytes, self._search = setting, limit_bytes, search
        self._candidates: dict[int, _Candidate | None] = {}

    def candidate(self, micro_batch_size: int) -> _Candidate | None:
        """Best assignment at this size; None if none fits."""
        if micro_batch_size not in self._candidates:
            workload = dataclasses.replace(self._setting.workload, micro_batch_size=micro_batch_size)
            setting = dataclasses.replace(self._setting, workload=workload)
            assignment = assign_modes(setting, limit_bytes=self._limit_bytes, search=self._search)
            found = None if assignment is None else _Candidate(setting=setting, assignment=assignment)
            self._candidates[micro_batch_size] = found
        return self._candidates[micro_batch_size]

    def largest(self, most: int) -> int:
        """Largest size that fits, 0 if not even one sample does: doubling to the first that does not, then halving."""
        fits, fails = 0, most + 1
        size = 1
        while size <= most:
            if self.candidate(size) is None:
                fails = size
                break
            fits, size = size, size * 2
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.candidate(middle) is None:
                fails = middle
            else:
                fits = middle
        return fits

    def best(self, most: int) -> _Candidate | None:
        """Best samples/s of all sizes tried; between equal ones the smallest."""
        if self.largest(most) == 0:
            return None
        while True:
            tried = sorted(size for size, found in self._candidates.items() if found is not None)
            best = max(tried, key=lambda size: (self._samples_per_s(size), -size))
            at = tried.index(best)
            neighbours = tried[max(0, at - 1) : at] + tried[at + 1 : at + 2]
            between = [(best + other) // 2 for other in neighbours if abs(best - other) > 1]
            if not between:
                return self._candidates[best]
            for size in between:
                self.candidate(size)

    def _samples_per_s(self, size: int) -> float:
        found = self._candidates[size]
        return found.samples_per_s if found is not None else 0.0


def _plan(best: _Candidate, memory_limit_bytes: int, search: str) -> Plan:
    setting, assignment = best.setting, best.assignment
    all_zdp = setting.least_memory_modes() if "ZDP" in setting.modes else None
    return Plan(
        fingerprint=dict(setting.profile.fingerprint),
        world_size=setting.cluster.world_size,
        units=_units(setting, assignment),
        memory_limit_bytes=memory_limit_bytes,
        peak_bytes=assignment.peak.peak_bytes,
        micro_batch_size=setting.workload.micro_batch_size,
        num_micro_batches=setting.workload.num_micro_batches,
        step_time_s=assignment.step_time_s,
        samples_per_s=best.samples_per_s,
        gap=assignment.gap,
        solver=search,
        backward_prefetch=setting.backward_prefetch,
        forward_prefetch=setting.forward_prefetch,
        all_zdp_step_time_s=setting.step_time_s(all_zdp) if all_zdp else 0.0,
        all_zdp_peak_bytes=setting.peak(all_zdp).peak_bytes if all_zdp else 0,
        notes=(assignment.note,) if assignment.note else (),
    )


def _units(setting: Setting, assignment: Assignment) -> tuple[Unit, ...]:
    units = []
    for unit, options, costs, mode in zip(setting.units, setting.options, setting.costs, assignment.modes, strict=True):
        slowest, fastest = max(cost.time_s for cost in costs), min(cost.time_s for cost in costs)
        units.append(
            Unit(
                name=unit.name,
                operators=tuple(operator.name for operator in unit.operators),
                kind=unit.kind,
                modes=(mode.name,),
                parameter_bytes=unit.gathered_bytes,
                time_s=costs[options.index(mode)].time_s,
                keep_saves_s=slowest - fastest,
                keep_costs_bytes=0 if unit.is_root else unit.gathered_bytes,
            )
        )
    return tuple(units)


def _why_infeasible(setting: Setting, sweep: _Sweep, limit_bytes: int) -> str:
    peak = setting.peak(setting.least_memory_modes())
    workload, ranks = setting.workload, setting.cluster.world_size
    samples = workload.micro_batch_size
    sizes = {
        unit.name or "the root unit": unit.gathered_bytes
        + (unit.parameter_bytes + unit.trainable_bytes + unit.optimizer_bytes) / ranks
        + unit.activation_bytes_per_sample * samples
        for unit in setting.units
    }
    largest = sorted(sizes.items(), key=lambda item: item[1], reverse=True)[:3]
    listed = ", ".join(f"{name} ({format_bytes(num_bytes)})" for name, num_bytes in largest)
    parts = ", ".join(f"{part} {format_bytes(num_bytes)}" for part, num_bytes in peak.parts.items())
    where = f"in {peak.phase}" + (f" at {peak.operator!r}" if peak.operator else "")
    fits = sweep.largest(samples - 1) if samples > 1 else 0
    if fits:
        remedy = f"a micro-batch of {fits} fits: OSDPStrategy(batch_size={fits}), or batch_size='scale'"
    else:
        remedy = f"raise memory_limit to {peak.peak_bytes} bytes, or use more than {ranks} ranks"
    return (
        f"No plan fits: the limit is {format_bytes(limit_bytes)} per rank, and a micro-batch of {samples} on {ranks}"
        f" ranks needs at least {format_bytes(peak.peak_bytes)} ({where}: {parts})."
        f" Largest contributors: {listed}. Nearest remedy: {remedy}."
    )
