"""One optimizer step, event by event: its time, its memory, and where both go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_osdp.core.blocks import with_activations
from lightning_osdp.core.cluster import UNIT_PARTS, Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost import (
    Moment,
    PeakMemory,
    Workload,
    evaluation_peak,
    gather_s,
    optimizer_s,
    overhead_s,
    reduce_s,
    saving_peak,
)
from lightning_osdp.engine import DEFAULT, Engine, Event
from lightning_osdp.simulation.timeline import Durations, Interval, Timeline


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """What one optimizer step is predicted to take on one rank."""

    time_s: float
    compute_s: float
    """Forward, backward and the optimizer step of all micro-batches."""
    communication_s: float
    """Collectives, hidden behind computing or not."""
    overhead_s: float
    """What the runtime takes for its units."""
    peak: PeakMemory
    """The largest moment: bytes, phase, operator, and what the bytes consist of."""
    evaluation_bytes: int = 0
    """Peak of an evaluation with batches of as many samples, see `cost.evaluation_peak`."""
    saving_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bound on rank 0's peak while a ``full`` or a ``sharded`` checkpoint is made and state dicts stay on the device,
    as they do on CPU; see `cost.saving_peak`."""
    moments: tuple[tuple[float, Moment], ...] = ()
    """Memory over time: seconds from the start of the step, and what is alive then, in the micro-batches that were gone
    through: the first, a steady and the last one."""
    intervals: tuple[Interval, ...] = ()
    """What computing and the communicator do, and when, in the micro-batches that were gone through."""

    @property
    def exposed_communication_s(self) -> float:
        """Seconds in which computing waits for collectives."""
        return max(0.0, self.time_s - self.compute_s - self.overhead_s)


def simulate_step(
    profile: ModelProfile,
    units: Sequence[UnitProfile],
    modes: Sequence[ShardingMode],
    cluster: Cluster,
    workload: Workload,
    *,
    engine: Engine = DEFAULT,
    rank: int | None = None,
) -> StepEstimate:
    """Goes through one optimizer step.

    Args:
        profile: the model.
        units: partition of its operators.
        modes: one per unit; what blocks do with what they save comes on top of what the profile has of it.
        cluster: ranks, links, and whether collectives overlap computing.
        workload: micro-batch size and number of micro-batches.
        engine: what runs the step.
        rank: whose memory; None: of the rank that holds most.
    """
    repeats = workload.num_micro_batches
    profile = in_modes(profile, units, modes)
    simulated = engine.events_of(profile, units, modes, cluster.world_size, num_micro_batches=repeats)
    durations = durations_of(profile, units, cluster, workload, engine)
    timeline = Timeline(
        durations, overlaps=cluster.overlaps, gathers_wait_for=engine.gathers_wait_for, keeps_intervals=True
    )
    moments: list[tuple[float, Moment]] = []

    def note(_: float, moment: Callable[[], Moment]) -> None:
        moments.append((timeline.now_s, moment()))

    live = engine.live_parts(
        profile,
        units,
        note,
        world_size=cluster.world_size,
        workload=workload,
        reduce_scatter_copies=cluster.reduce_scatter_copies,
        rank=rank,
    )
    for index, events in enumerate(simulated):
        live.begin_micro_batch()
        for event in events:
            timeline.read(event, index)
            live.read(event)
        timeline.end_backward()
    live.update()
    update_s = optimizer_s(profile, cluster)
    return StepEstimate(
        time_s=timeline.total_s(repeats) + update_s,
        compute_s=repeats * (sum(durations.forward_s) + sum(durations.backward_s)) + update_s,
        communication_s=_total_s(simulated, {"gather": durations.gather_s, "reduce": durations.reduce_s}, repeats),
        overhead_s=_total_s(simulated, durations.overhead_s, repeats),
        peak=PeakMemory.of(max((moment for _, moment in moments), key=lambda moment: moment.num_bytes)),
        evaluation_bytes=math.ceil(
            evaluation_peak(
                profile,
                units,
                modes,
                world_size=cluster.world_size,
                num_samples=workload.micro_batch_size,
                engine=engine,
            )
        ),
        saving_bytes={
            kind: math.ceil(
                saving_peak(
                    profile,
                    units,
                    modes,
                    world_size=cluster.world_size,
                    is_sharded=kind == "sharded",
                    goes_to_host=False,
                    engine=engine,
                )
            )
            for kind in ("full", "sharded")
        },
        moments=tuple(moments),
        intervals=tuple(timeline.intervals),
    )


def in_modes(profile: ModelProfile, units: Sequence[UnitProfile], modes: Sequence[ShardingMode]) -> ModelProfile:
    """The profile with blocks as the modes of their units have them; itself where all keep what they save."""
    chosen = {unit.name: mode.activations for unit, mode in zip(units, modes, strict=True)}
    return with_activations(profile, chosen)


def durations_of(
    profile: ModelProfile,
    units: Sequence[UnitProfile],
    cluster: Cluster,
    workload: Workload,
    engine: Engine,
) -> Durations:
    """Seconds of each event of one micro-batch."""
    samples = workload.micro_batch_size
    copies_s = [0.0] * len(profile.segments)
    for (_, last), num_bytes in profile.copied:
        copies_s[last] += num_bytes.at(samples) * cluster.host_copy_s_per_byte
    return Durations(
        forward_s=[segment.forward_s.at(samples) + s for segment, s in zip(profile.segments, copies_s, strict=True)],
        backward_s=[segment.backward_s.at(samples) + s for segment, s in zip(profile.segments, copies_s, strict=True)],
        gather_s=[gather_s(unit, cluster, engine) for unit in units],
        reduce_s=[reduce_s(unit, cluster, engine) for unit in units],
        overhead_s={part: [overhead_s(unit, part, cluster) for unit in units] for part in UNIT_PARTS},
    )


def _total_s(
    simulated: Sequence[Sequence[Event]], seconds: Mapping[str, Sequence[float]], num_micro_batches: int
) -> float:
    """Seconds of all events of a step that are of these kinds."""
    each_s = [sum(seconds[kind][of] for kind, of in events if kind in seconds) for events in simulated]
    num_more = num_micro_batches - len(each_s)
    return sum(each_s) + (num_more * each_s[1] if num_more else 0.0)
