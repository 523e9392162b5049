"""Seconds of one optimizer step, without its memory: for a search that asks for many choices of modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import ModelProfile, Rerun
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost import Workload, activations_s, copied_s, optimizer_s, overhead_cost
from lightning_osdp.cost.schedule import MOST_SIMULATED, Event, micro_batches
from lightning_osdp.simulation.step import durations_of
from lightning_osdp.simulation.timeline import Durations, Timeline


class Step(NamedTuple):
    """What was found of one choice of modes."""

    time_s: float
    stalls_s: Mapping[int, float]
    """Unit -> seconds for which computing waits for it in the last backward."""


class StepClock:
    """The time of `simulate_step` for any modes, with what no mode changes worked out once.

    A unit's events depend on its own mode alone: one that is kept does without some of those of one that is freed.

    Args:
        profile: the model.
        units: partition of its operators.
        cluster: ranks, links, and whether collectives overlap computing.
        workload: micro-batch size and number of micro-batches.
        backward_prefetch: ``pre``, ``post`` or ``none``.
        forward_prefetch: FSDP1's option.
    """

    def __init__(
        self,
        profile: ModelProfile,
        units: Sequence[UnitProfile],
        cluster: Cluster,
        workload: Workload,
        *,
        backward_prefetch: str,
        forward_prefetch: bool,
    ) -> None:
        self.cluster, self.workload, self.num_micro_batches = cluster, workload, workload.num_micro_batches
        self.optimizer_s = optimizer_s(profile, cluster)
        self.durations = durations_of(profile, units, cluster, workload)
        self.units, self.samples = units, workload.micro_batch_size
        self.events = _classed(
            tuple(units),
            len(profile.segments),
            tuple(profile.rerun.items()),
            is_sharded=cluster.world_size > 1,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
        )
        """Events of a micro-batch in which every unit is freed, each with its class: see `_absent`."""

    def step(self, modes: Sequence[ShardingMode]) -> Step:
        """One optimizer step with these modes, one per unit."""
        timeline = Timeline(self._with_activations(modes), overlaps=self.cluster.overlaps)
        num_simulated = min(MOST_SIMULATED, self.num_micro_batches)
        for index in range(num_simulated):
            absent = [_absent(mode, is_first=index == 0, is_last=index == num_simulated - 1) for mode in modes]
            timeline.read_all(event for event, kind in self.events if kind is None or kind not in absent[event.of])
        return Step(timeline.total_s(self.num_micro_batches) + self.optimizer_s, timeline.stalls_s)

    def _with_activations(self, modes: Sequence[ShardingMode]) -> Durations:
        """Seconds of every event where blocks do with what they save as the modes say."""
        durations = self.durations
        if all(mode.activations == "keep" for mode in modes):
            return durations
        forward_s, backward_s = list(durations.forward_s), list(durations.backward_s)
        for unit, (of, mode) in enumerate(zip(self.units, modes, strict=True)):
            forward_s[of.last] += self.copied_s(unit, mode)
            backward_s[of.last] += self.activations_s(unit, mode) - self.copied_s(unit, mode)
        return durations._replace(forward_s=forward_s, backward_s=backward_s)

    def activations_s(self, unit: int, mode: ShardingMode) -> float:
        """Seconds of a micro-batch that a unit's block takes to do without what it would save."""
        return activations_s(self.units[unit], mode, self.cluster, self.samples)

    def copied_s(self, unit: int, mode: ShardingMode) -> float:
        """The part of that which its forward takes."""
        return copied_s(self.units[unit].block, mode.activations, self.cluster, self.samples)

    def overhead_s(self, unit: int, mode: ShardingMode) -> float:
        """Seconds of a step that the runtime takes for a unit."""
        return overhead_cost(self.units[unit], mode, cluster=self.cluster, workload=self.workload).time_s


@cache
def _absent(mode: ShardingMode, *, is_first: bool, is_last: bool) -> frozenset[str]:
    """Classes of events that a unit in this mode does without in such a micro-batch.

    ``freed``: those of a unit that is freed in forward, alone; ``gather``, ``free``, ``reduce`` and, in its place,
    ``accumulate``: those of all units.
    """
    classes = {"freed"} if mode.resident else set()
    waits = mode.sync == "last" and not is_last
    classes.add("reduce" if waits else "accumulate")
    if waits and mode.resident:
        classes.add("free")
    if mode.sync == "last" and mode.resident and not is_first:
        classes.add("gather")
    return frozenset(classes)


@lru_cache(maxsize=128)
def _classed(
    units: tuple[UnitProfile, ...],
    num_segments: int,
    rerun: tuple[tuple[str, Rerun], ...],
    *,
    is_sharded: bool,
    backward_prefetch: str,
    forward_prefetch: bool,
) -> tuple[tuple[Event, str | None], ...]:
    """Events of freed units; those of kept ones are some of these, in the same order.

    Each ``reduce`` is followed by the ``accumulate`` that may take its place.
    """
    (freed,), (kept,) = (
        micro_batches(
            units,
            [unit.calls for unit in units],
            [is_kept] * len(units),
            [False] * len(units),
            num_segments=num_segments,
            rerun=dict(rerun),
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
        )
        for is_kept in (False, is_sharded)
    )
    left = iter(kept)
    expected = next(left, None)
    classed: list[tuple[Event, str | None]] = []
    for event in freed:
        if event == expected:
            classed.append((event, event.kind if event.kind in {"gather", "free", "reduce"} else None))
            expected = next(left, None)
            if event.kind == "reduce":
                classed.append((Event("accumulate", event.of), "accumulate"))
        else:
            classed.append((event, "freed"))
    return tuple(classed)
