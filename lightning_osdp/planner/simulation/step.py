"""One optimizer step, event by event: its time, its memory, and where both go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, Contention
from lightning_osdp.core.step import Step
from lightning_osdp.planner.cost import (
    PeakMemory,
    collective_s,
    copied_out_s,
    evaluation_peak,
    host_updates,
    overhead_part_s,
    saving_peak,
    update_s,
)
from lightning_osdp.planner.engine import (
    COLLECTIVES,
    DEFAULT,
    FSDP2,
    GATHERS,
    OVERHEAD,
    Event,
    Moment,
    in_modes,
)
from lightning_osdp.planner.simulation.contention import ContendedTimeline
from lightning_osdp.planner.simulation.timeline import Durations, Interval, Timeline


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Predicted time and memory of one optimizer step on one rank."""

    time_s: float
    compute_s: float
    """Forward, backward and the optimizer step of all micro-batches, and what it waits for updates on the host."""
    communication_s: float
    """Collectives, and copies of shards from the host, hidden behind computing or not."""
    overhead_s: float
    """Seconds that the runtime takes for its units."""
    contention_s: float = 0.0
    """Seconds by which both of these take longer because collectives run beside them, see `Cluster.contention`."""
    peak: PeakMemory
    """The largest moment: bytes, phase, operator, and what the bytes consist of."""
    reserved_bytes: int = 0
    """Bytes that CUDA's allocator reserves for it at least, see `reserved_by`."""
    evaluation_bytes: int = 0
    """Peak of an evaluation with batches of as many samples."""
    saving_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bound on rank 0's peak while a ``full`` or a ``sharded`` checkpoint is made and state dicts stay on the device,
    as they do on CPU."""
    moments: tuple[tuple[float, Moment], ...] = ()
    """Memory over time: seconds from the start of the step, and what is alive then, in the micro-batches that were gone
    through: the first, a steady and the last one."""
    intervals: tuple[Interval, ...] = ()
    """Events of computing and of the communicators, with their times, in the micro-batches that were simulated."""
    updates: tuple[Interval, ...] = ()
    """Updates on the host that may begin in backward, in the last of these micro-batches and after it."""

    @property
    def exposed_communication_s(self) -> float:
        """Seconds in which computing waits for collectives, or for gradients on their way to the host."""
        return max(0.0, self.time_s - self.compute_s - self.overhead_s - self.contention_s)


def simulate_step(
    step: Step, modes: Sequence[Treatment], *, engine: FSDP2 = DEFAULT, rank: int | None = None
) -> StepEstimate:
    """Goes through one optimizer step.

    Effects of blocks by their modes come on top of those that the profile has. Memory is this rank's, or that of the
    rank that holds most.
    """
    step = in_modes(step, modes)
    num_micro_batches = step.workload.num_micro_batches
    simulated = engine.events_of(step, modes)
    durations = with_host(durations_of(step, engine), step, modes)
    timeline = timeline_of(durations, step.cluster, engine, keeps_intervals=True)
    moments: list[tuple[float, Moment]] = []

    def note(_: float, moment: Callable[[], Moment]) -> None:
        last_s = moments[-1][0] if moments else 0.0
        moments.append((max(timeline.now_s, last_s), moment()))  # rounding may take what is left below nothing

    live = engine.live_parts(step, note, modes=modes, rank=rank)
    live.begin_step()
    for index, events in enumerate(simulated):
        live.begin_micro_batch()
        for event in events:
            timeline.read(event, index)
            live.read(event)
        timeline.end_backward()
    live.update()
    alive = [moment for _, moment in moments]
    updated_s = update_s(step, modes)
    return StepEstimate(
        time_s=timeline.total_s(num_micro_batches) + updated_s,
        compute_s=num_micro_batches * (sum(durations.forward_s) + sum(durations.backward_s))
        + updated_s
        + timeline.updating_s,
        communication_s=_total_s(simulated, durations.collectives_s, num_micro_batches),
        overhead_s=_total_s(simulated, durations.overhead_s, num_micro_batches),
        contention_s=timeline.total_slowed_s(num_micro_batches),
        peak=PeakMemory.of(max(alive, key=lambda moment: moment.num_bytes)),
        reserved_bytes=math.ceil(reserved_by(alive)),
        evaluation_bytes=math.ceil(evaluation_peak(step, modes, engine=engine)),
        saving_bytes={
            kind: math.ceil(saving_peak(step, modes, is_sharded=kind == "sharded", engine=engine))
            for kind in ("full", "sharded")
        },
        moments=tuple(moments),
        intervals=tuple(sorted(timeline.intervals, key=lambda each: each.start_s)),
        updates=tuple(timeline.updates),
    )


def seconds_by_link(
    step: Step, modes: Sequence[Treatment], *, engine: FSDP2 = DEFAULT
) -> Callable[[Callable[[str], float]], float]:
    """Seconds of the step of `simulate_step` as a function of a factor for collectives, by their link."""
    step = in_modes(step, modes)
    durations = with_host(durations_of(step, engine), step, modes)
    simulated = engine.events_of(step, modes)
    offered, updated_s = durations.collectives_s, update_s(step, modes)

    def seconds(factor: Callable[[str], float]) -> float:
        taken_s: dict[str, list[float]] = {
            kind: [factor(each.link) * of_unit for of_unit in offered[kind]]
            for kind, each in COLLECTIVES.items()
            if kind in offered
        }
        timeline = timeline_of(durations._replace(collectives_s=taken_s), step.cluster, engine)
        for events in simulated:
            for event in events:
                timeline.read(event)
            timeline.end_backward()
        return timeline.total_s(step.workload.num_micro_batches) + updated_s

    return seconds


def with_host(durations: Durations, step: Step, modes: Sequence[Treatment]) -> Durations:
    """Durations with those of updates and copies of gradients on the host."""
    return durations._replace(updates=host_updates(step, modes), copied_out_s=copied_out_s(step, modes))


def reserved_by(moments: Sequence[Moment]) -> float:
    """Bytes that a caching allocator with a pool for each stream has reserved after these moments.

    Memory that one stream has freed is given to no other before all runs out, so each stream's largest moment counts.
    ``fully_shard`` fills the buffers of synchronous all-gathers in one stream, leaves reduced gradients in that of
    reduce-scatters, and allocates all else in the stream that computes. (The result of a reduce-scatter that is going
    on is counted there, too.) What is lost to rounding and fragmentation comes on top.

    References:
        c10/cuda/CUDACachingAllocator.cpp (``BlockPool``); torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py
        (``foreach_all_gather``, ``foreach_reduce``). [Not run on CUDA.]
    """
    reduced = [moment.parts["reduced gradients"] for moment in moments]
    computing = [
        moment.num_bytes - moment.gather_buffers - apart for moment, apart in zip(moments, reduced, strict=True)
    ]
    return max(computing) + max(moment.gather_buffers for moment in moments) + max(reduced)


def timeline_of(durations: Durations, cluster: Cluster, engine: FSDP2, *, keeps_intervals: bool = False) -> Timeline:
    """Timeline without events, in which computing and collectives slow each other down as on this cluster."""
    # without streams the host waits for an all-gather that is not asynchronous
    begins_by_itself = not engine.asynchronous_unshard and cluster.has_streams
    copies_beside, is_alone = engine.copies_beside(cluster), cluster.world_size == 1
    waits_for = {*cluster.waits_for, *(() if engine.asynchronous_unshard or cluster.has_streams else GATHERS)}
    settings: dict[str, Any] = {
        "asynchronous_unshard": not begins_by_itself,
        "copies_beside": copies_beside,
        "is_alone": is_alone,
        "waits_for": waits_for,
        "keeps_intervals": keeps_intervals,
    }
    if cluster.overlaps and cluster.contention != Contention():
        return ContendedTimeline(durations, cluster.contention, **settings)
    return Timeline(durations, overlaps=cluster.overlaps or (is_alone and copies_beside), **settings)


def durations_of(step: Step, engine: FSDP2) -> Durations:
    """Seconds of each event of one micro-batch."""
    profile, units, cluster = step.profile, step.units, step.cluster
    micro_batch_size = step.workload.micro_batch_size
    copies_s = [0.0] * len(profile.segments)
    for (_, last), num_bytes in profile.copied:
        copies_s[last] += num_bytes.at(micro_batch_size) * cluster.host_copy_s_per_byte
    segments = [*zip(profile.segments, copies_s, strict=True)]
    parts_s = {part: [overhead_part_s(unit, part, cluster) for unit in units] for part in UNIT_PARTS}
    offered = [each for each in dict.fromkeys(COLLECTIVES.values()) if cluster.has_nodes or each.over == "all"]
    seconds = {each: [collective_s(unit, each, cluster, step.workload, engine) for unit in units] for each in offered}
    return Durations(
        forward_s=[segment.forward_s.at(micro_batch_size) + s for segment, s in segments],
        backward_s=[segment.backward_s.at(micro_batch_size) + s for segment, s in segments],
        collectives_s={kind: seconds[each] for kind, each in COLLECTIVES.items() if each in seconds},
        overhead_s={kind: parts_s[part] for kind, part in OVERHEAD.items()},
    )


def _total_s(
    simulated: Sequence[Sequence[Event]], seconds: Mapping[str, Sequence[float]], num_micro_batches: int
) -> float:
    """Seconds of all events of a step that are of these kinds."""
    each_s = [sum(seconds[kind][of] for kind, of in events if kind in seconds) for events in simulated]
    num_more = num_micro_batches - len(each_s)
    return sum(each_s) + (num_more * each_s[1] if num_more else 0.0)
