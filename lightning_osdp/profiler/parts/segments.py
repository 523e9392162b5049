"""Segments of a profile: seconds and bytes of each, as functions of the micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.profile import ALIVE_BYTES, Segment
from lightning_osdp.profiler.timing.step_time import Seconds
from lightning_osdp.profiler.tracing.operators import Operator
from lightning_osdp.profiler.tracing.saved_bytes import Activations
from lightning_osdp.profiler.tracing.trace import Trace

WORKSPACES = ("forward_workspace_bytes", "backward_workspace_bytes", "rerun_workspace_bytes")
_AFFINE_BYTES = ("saved_bytes", "handed_bytes", "evaluation_bytes", *WORKSPACES)
"""Fields of both `Activations` and `Segment`."""


def profile_segments(
    operators: Sequence[Operator], trace: Trace, seconds: Mapping[int, Seconds]
) -> tuple[Segment, ...]:
    """Segments of the model in which all blocks keep what they save.

    Seconds are the mean over a group of equal segments: with equal operators, followed by equal operators, that save
    equally many bytes. Single measurements differ by noise, for which the planner would treat equal blocks differently.
    """
    names = [*trace.calls.sequence, ""]
    signatures = {operator.name: operator.signature for operator in operators if operator.name}
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, name in enumerate(names):
        following = names[index + 1] if index + 1 < len(names) else ""
        saved = tuple(parts[index].saved_bytes for parts in trace.activations.values())
        groups.setdefault((signatures.get(name), signatures.get(following), saved), []).append(index)
    group_of = {index: group for group in groups.values() for index in group}

    def mean_s(index: int, phase: str) -> Affine:
        group = group_of[index]
        return affine({size: sum(getattr(s, phase)[i] for i in group) / len(group) for size, s in seconds.items()})

    before = bytes_saved_before(trace)
    return tuple(
        Segment(
            operator=name,
            forward_s=mean_s(index, "forward_s"),
            backward_s=mean_s(index, "backward_s"),
            **segment_bytes({size: parts[index] for size, parts in trace.activations.items()}, before[index]),
        )
        for index, name in enumerate(names)
    )


def affine(values: Mapping[int, float]) -> Affine:
    """Line through the values at one or two micro-batch sizes, exact at the first."""
    (size, exactly), *others = values.items()
    return Affine.through(size, exactly, *others[0]) if others else Affine.proportional(size, exactly)


def segment_bytes(at: Mapping[int, Activations], saved_before: Mapping[int, int]) -> dict[str, Any]:
    """Fields of a `Segment` that are bytes, from its trace and the bytes saved by segments before it."""

    def alive(name: str) -> Affine | None:
        """Bytes of the trace and bytes saved by this segment and the segments before it."""
        beside = {size: getattr(part, name) for size, part in at.items()}
        if None in beside.values():
            return None
        return affine({size: saved_before[size] + part.saved_bytes + beside[size] for size, part in at.items()})

    return {
        **{name: affine({size: getattr(part, name) for size, part in at.items()}) for name in _AFFINE_BYTES},
        **{name: alive(name) for name in ALIVE_BYTES},
    }


def bytes_saved_before(trace: Trace) -> list[dict[int, int]]:
    """Bytes that the segments before each segment have saved, by micro-batch size."""
    sums = {size: accumulate((p.saved_bytes for p in parts), initial=0) for size, parts in trace.activations.items()}
    return [dict(zip(sums, before, strict=True)) for before in zip(*sums.values(), strict=True)]
