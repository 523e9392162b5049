"""The predicted step in the format that Chrome, Perfetto and the viewers of ``torch.profiler`` open.

References:
    Trace Event Format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): complete events
    (``X``), counters (``C``) and metadata (``M``) in an object; times are in microseconds.
    torch/profiler/_chrome_trace_export.py: ``schemaVersion``, ``deviceProperties``, and streams as threads of a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from lightning_osdp.core.axes import KEEP
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.step import Step
from lightning_osdp.planner.engine import Moment, block_effects
from lightning_osdp.planner.simulation import Interval, StepEstimate, planned_activations, planned_step, simulate

STREAMS = ("compute", "communication", "copy", "host")
"""Rows of the trace: what the device computes, the collectives, copies of activations to host memory and back and of
shards from there, and updates on the host that may begin in backward."""
_COLLECTIVES = {
    "copy_in": "shard from the host",
    "gather": "all-gather",
    "gather_in_node": "all-gather in nodes",
    "reduce": "reduce-scatter",
    "reduce_in_node": "reduce-scatter in nodes",
    "scatter_in_node": "reduce-scatter in nodes",
    "all_reduce": "all-reduce between nodes",
    "reduce_whole": "all-reduce",
    "exchange_inputs": "exchange of inputs",
    "exchange_outputs": "exchange of outputs",
    "exchange_output_gradients": "exchange of gradients of outputs",
    "exchange_input_gradients": "exchange of gradients of inputs",
    "exchange_inputs_in_node": "exchange of inputs in nodes",
    "exchange_outputs_in_node": "exchange of outputs in nodes",
    "exchange_output_gradients_in_node": "exchange of gradients of outputs in nodes",
    "exchange_input_gradients_in_node": "exchange of gradients of inputs in nodes",
    "sum_between": "all-reduce between nodes",
}
_OVERHEAD = {
    "flatten": "gradients complete",
    "stay": "resident or replicated unit",
    "reduce": "before reduce-scatter",
    "accumulate": "accumulate gradients",
}
"""Work of the runtime for a unit, beside collectives."""
_MEMORY = "memory (bytes)"
_US = 1e6

_Row = dict[str, Any]


def chrome_trace(plan: Plan, profile: ModelProfile, cluster: Cluster) -> dict[str, Any]:
    """One optimizer step as `simulate` predicts it, as a JSON object for viewers of traces.

    Streams are threads of one process, the rank; memory is a counter of bytes by what they are, with the largest moment
    at each instant. Micro-batches that the simulator does not go through (all but the first, a steady and the last one)
    are drawn like the steady one.

    Args:
        plan: of the step.
        profile: of its model.
        cluster: of as many ranks.

    Raises:
        PlanMismatchError: the plan is for another model or another number of ranks.
    """
    estimate = simulate(plan, profile, cluster)
    step, _ = planned_step(plan, profile, cluster)
    drawn = _Drawn.of(estimate, plan.num_micro_batches)
    again = _again(step, profile, planned_activations(plan, profile))
    events = [*_named_rows(plan), *_slices(drawn, step, again), *_counters(drawn)]
    later_s = drawn.end_s - max((each.end_s for each in estimate.intervals), default=0.0)
    for resource, (_, of), _, start_s, end_s in estimate.updates:
        unit = step.units[of].name
        times_s = start_s + later_s, end_s + later_s
        events.append(_slice(f"update {unit or '(root)'}", resource, *times_s, {"unit": unit}))
    update_s = estimate.time_s - drawn.end_s
    if update_s > 0:
        events.append(_slice("optimizer step", STREAMS[0], drawn.end_s, estimate.time_s, {"phase": "optimizer step"}))
    return {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": 0, "name": "predicted by lightning-osdp", "totalGlobalMem": plan.memory_limit_bytes}
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "step_time_s": estimate.time_s,
            "compute_s": estimate.compute_s,
            "communication_s": estimate.communication_s,
            "exposed_communication_s": estimate.exposed_communication_s,
            "overhead_s": estimate.overhead_s,
            "contention_s": estimate.contention_s,
            "peak_bytes": estimate.peak.peak_bytes,
            "memory_limit_bytes": plan.memory_limit_bytes,
        },
        "traceEvents": events,
    }


@dataclass(frozen=True)
class _Drawn:
    """Events and memory of all micro-batches, with the steady one in place of those that were not simulated."""

    intervals: tuple[Interval, ...]
    memory: tuple[tuple[float, dict[str, float]], ...]
    """Seconds from the start, and bytes by what they are, of the largest moment then."""
    end_s: float

    @classmethod
    def of(cls, estimate: StepEstimate, num_micro_batches: int) -> _Drawn:
        ends = [0.0] * (1 + max((each.micro_batch for each in estimate.intervals), default=0))
        for each in estimate.intervals:
            ends[each.micro_batch] = max(ends[each.micro_batch], each.end_s)
        ends = list(accumulate(ends, max))
        more = max(0, num_micro_batches - len(ends)) if len(ends) > 2 else 0
        period_s = ends[1] - ends[0] if more else 0.0
        # simulated micro-batch, the one that it is drawn as, and how much later
        places = [(0, 0, 0.0), *((1, 1 + i, i * period_s) for i in range(more + 1)), (2, 2 + more, more * period_s)]
        intervals: list[Interval] = []
        memory: list[tuple[float, Moment]] = []
        for source, micro_batch, later_s in places[: len(ends) + more]:
            intervals += [
                each._replace(micro_batch=micro_batch, start_s=each.start_s + later_s, end_s=each.end_s + later_s)
                for each in estimate.intervals
                if each.micro_batch == source
            ]
            begin_s = ends[source - 1] if source else -1.0
            last_s = ends[source] if source < len(ends) - 1 else estimate.time_s
            memory += [(at_s + later_s, moment) for at_s, moment in estimate.moments if begin_s < at_s <= last_s]
        largest = (max(group, key=lambda one: one[1].num_bytes) for _, group in groupby(memory, key=lambda one: one[0]))
        return cls(
            tuple(intervals),
            tuple((at_s, dict(moment.parts)) for at_s, moment in largest),
            ends[-1] + more * period_s,
        )


def _named_rows(plan: Plan) -> Iterator[_Row]:
    yield _metadata("process_name", 0, {"name": f"one of {plan.world_size} ranks, as predicted"})
    for thread, stream in enumerate(STREAMS):
        yield _metadata("thread_name", thread, {"name": f"{stream} stream"})
        yield _metadata("thread_sort_index", thread, {"sort_index": thread})


def _metadata(name: str, thread: int, arguments: dict[str, Any]) -> _Row:
    return {"ph": "M", "name": name, "pid": 0, "tid": thread, "ts": 0, "args": arguments}


def _slice(name: str, stream: str, start_s: float, end_s: float, arguments: dict[str, Any]) -> _Row:
    thread = STREAMS.index(stream)
    return {
        "ph": "X",
        "cat": "gpu_memcpy" if stream == "copy" else "kernel",
        "name": name,
        "pid": 0,
        "tid": thread,
        "ts": start_s * _US,
        "dur": (end_s - start_s) * _US,
        "args": {"device": 0, "stream": thread, **arguments},
    }


def _slices(drawn: _Drawn, step: Step, again: Mapping[int, tuple[str, float]]) -> Iterator[_Row]:
    copied_s = _copied_s(step)
    for resource, (kind, of), micro_batch, start_s, end_s in drawn.intervals:
        arguments: dict[str, Any] = {"micro-batch": micro_batch}
        if kind not in {"forward", "backward"}:
            unit = step.units[of]
            names = _OVERHEAD if resource == "compute" and kind in _OVERHEAD else _COLLECTIVES
            arguments |= {"unit": unit.name, "unit bytes": unit.gathered_bytes}
            stream = "copy" if kind == "copy_in" else resource  # whichever waits for it
            yield _slice(f"{names[kind]} {unit.name or '(root)'}", stream, start_s, end_s, arguments)
            continue
        arguments["phase"] = kind
        copy_s = copied_s.get(of, 0.0)
        # a block's copies follow its forward, and come before its backward
        begins, ends = (start_s, end_s - copy_s) if kind == "forward" else (start_s + copy_s, end_s)
        name = step.profile.segments[of].operator or "loss"
        if kind == "backward" and of in again:
            block, share = again[of]
            from_s, begins = begins, begins + share * (ends - begins)
            yield _slice(f"backward {block}: forward again", resource, from_s, begins, arguments)
        if ends > begins:
            yield _slice(f"{kind} {name}", resource, begins, ends, arguments)
        if copy_s:
            copy = (ends, end_s) if kind == "forward" else (start_s, begins)
            yield _slice("copy to host" if kind == "forward" else "copy from host", "copy", *copy, arguments)


def _copied_s(step: Step) -> dict[int, float]:
    """Segment -> seconds of copies at its end in forward, and as many before its backward; as in `simulate_step`."""
    seconds: dict[int, float] = {}
    for (_, last), num_bytes in step.profile.copied:
        copy_s = num_bytes.at(step.workload.micro_batch_size) * step.cluster.host_copy_s_per_byte
        seconds[last] = seconds.get(last, 0.0) + copy_s
    return seconds


def _again(step: Step, profile: ModelProfile, activations: Mapping[str, str]) -> dict[int, tuple[str, float]]:
    """Segment -> the block that ends with it, and the fraction of its backward in which the block runs again."""
    found, samples = {}, step.workload.micro_batch_size
    for block in profile.blocks:
        again_s = block_effects(block, activations.get(block.name, KEEP)).rerun_s.at(samples)
        if block.name in step.profile.rerun and again_s > 0:
            _, last = step.profile.rerun[block.name].span
            found[last] = block.name, min(1.0, again_s / step.profile.segments[last].backward_s.at(samples))
    return found


def _counters(drawn: _Drawn) -> Iterator[_Row]:
    names: Sequence[str] = list(dict.fromkeys(name for _, parts in drawn.memory for name in parts))
    for at_s, parts in drawn.memory:
        values = {name: round(parts.get(name, 0.0)) for name in names}
        yield {"ph": "C", "name": _MEMORY, "pid": 0, "tid": 0, "ts": at_s * _US, "args": values}
