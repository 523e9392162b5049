"""Seconds of one optimizer step, without its memory: for a search that asks for many choices of modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import DP, MODES, ZDP, ShardingMode
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost import Workload, optimizer_s
from lightning_osdp.cost.schedule import Event
from lightning_osdp.simulation.step import durations_of, events_of
from lightning_osdp.simulation.timeline import MOST_SIMULATED, Durations, Timeline


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
        self.cluster, self.num_micro_batches = cluster, workload.num_micro_batches
        self.optimizer_s = optimizer_s(profile, cluster)
        self.durations: dict[ShardingMode, Durations] = {
            mode: durations_of(profile, units, [mode] * len(units), cluster, workload) for mode in MODES.values()
        }
        freed, kept = (
            events_of(
                profile,
                units,
                [mode] * len(units),
                cluster.world_size,
                backward_prefetch=backward_prefetch,
                forward_prefetch=forward_prefetch,
            )
            for mode in (ZDP, DP)
        )
        self.events = _marked(freed, kept)
        """Events of a micro-batch, each with whether only a unit that is freed has it."""

    def step(self, modes: Sequence[ShardingMode]) -> Step:
        """One optimizer step with these modes, one per unit."""
        is_kept = [mode.resident for mode in modes]
        events = [event for event, is_of_freed in self.events if not (is_of_freed and is_kept[event.of])]
        overhead_s = [self.durations[mode].overhead_s[unit] for unit, mode in enumerate(modes)]
        timeline = Timeline(self.durations[ZDP]._replace(overhead_s=overhead_s), overlaps=self.cluster.overlaps)
        for _ in range(min(MOST_SIMULATED, self.num_micro_batches)):
            timeline.read_all(events)
        return Step(timeline.total_s(self.num_micro_batches) + self.optimizer_s, timeline.stalls_s)


def _marked(freed: Sequence[Event], kept: Sequence[Event]) -> list[tuple[Event, bool]]:
    """Events of freed units, with whether kept ones lack them: these are the others, in the same order."""
    left = iter(kept)
    expected = next(left, None)
    marked = []
    for event in freed:
        is_common = event == expected
        marked.append((event, not is_common))
        if is_common:
            expected = next(left, None)
    return marked
