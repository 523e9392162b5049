"""Bytes of segments, traced at one or two micro-batch sizes, as functions of the size; and blocks that save less."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.profile import BlockProfile, Crossing, Segment
from lightning_osdp.profiler.tracing.passed_tensors import borrowed, crossings_of
from lightning_osdp.profiler.tracing.saved_bytes import Activations
from lightning_osdp.profiler.tracing.trace import Trace

Traced = Mapping[int, Sequence[Activations]]
"""By micro-batch size, of each segment; the profiled size is first."""


def affine(values: Mapping[int, float]) -> Affine:
    """A line over the micro-batch through the values at one or two sizes, exact at the first."""
    (size, exactly), *others = values.items()
    return Affine.through(size, exactly, *others[0]) if others else Affine.proportional(size, exactly)


def segment_bytes(traced: Traced, index: int, saved_before: Mapping[int, int]) -> dict[str, Any]:
    """The fields of a `Segment` that are bytes.

    Args:
        traced: what was traced.
        index: of the segment.
        saved_before: by micro-batch size, what the segments before it have saved, in the model at hand.
    """
    at = {size: parts[index] for size, parts in traced.items()}

    def num_bytes(of: Callable[[Activations], int]) -> Affine:
        return affine({size: of(part) for size, part in at.items()})

    def alive(of: Callable[[Activations], int | None]) -> Affine | None:
        """With what this segment and those before it have saved."""
        beside = {size: of(part) for size, part in at.items()}
        found = {
            size: saved_before[size] + at[size].saved_bytes + num_bytes
            for size, num_bytes in beside.items()
            if num_bytes is not None
        }
        return affine(found) if len(found) == len(at) else None

    return {
        "saved_bytes": num_bytes(lambda part: part.saved_bytes),
        "forward_workspace_bytes": num_bytes(lambda part: part.forward_workspace_bytes),
        "handed_bytes": num_bytes(lambda part: part.handed_bytes),
        "backward_workspace_bytes": num_bytes(lambda part: part.backward_workspace_bytes),
        "rerun_workspace_bytes": num_bytes(lambda part: part.rerun_workspace_bytes),
        "evaluation_bytes": num_bytes(lambda part: part.evaluation_bytes),
        "settled_bytes": alive(lambda part: part.settled_bytes),
        "passed_bytes": alive(lambda part: part.passed_bytes),
    }


def saved_before(traced: Traced) -> list[dict[int, int]]:
    """For each segment, by micro-batch size: what the segments before it have saved."""
    sums = {size: [*accumulate((part.saved_bytes for part in parts), initial=0)] for size, parts in traced.items()}
    return [dict(zip(sums, before, strict=True)) for before in zip(*sums.values(), strict=True)]


def profile_blocks(trace: Trace, segments: Sequence[Segment], choices: Sequence[str]) -> tuple[BlockProfile, ...]:
    """The blocks of a trace.

    Args:
        trace: with what was traced of blocks that save less.
        segments: of the model in which all keep what they save.
        choices: what blocks may do, of `ACTIVATION_CHOICES`.
    """
    found = []
    before, crossings = saved_before(trace.activations), profile_crossings(trace)
    for name, (first, last) in trace.blocks.items():
        kept = segments[first : last + 1]
        ways = {
            choice: tuple(_saving_less(kept, traced, first, before[first]))
            for choice, traced in trace.saving_less.items()
        }
        copied = {"offload": _saved(kept)} if "offload" in ways else {}
        if "recompute" in ways and "recompute_offload" in choices:
            copied["recompute_offload"] = _saved(ways["recompute"])
            ways["recompute_offload"] = _with_inputs_away(ways["recompute"])
        ways = {choice: way for choice, way in ways.items() if choice in choices}
        if ways:
            rerun_s = sum((segment.forward_s for segment in kept), ZERO)
            again = trace.saving_less.get("recompute", {}).values()
            found.append(
                BlockProfile(
                    name=name,
                    span=(first, last),
                    segments=ways,
                    rerun_s=rerun_s,
                    reruns_early=any(parts[last].reruns_early for parts in again),
                    copied_bytes=copied,
                    borrowed_bytes=borrowed(crossings, (first, last)),
                )
            )
    return tuple(found)


def profile_crossings(trace: Trace) -> tuple[Crossing, ...]:
    """Tensors of a trace that more than one of the blocks and the rest of the model may save."""
    by_choice = {
        choice: {size: [part.crossings for part in parts] for size, parts in traced.items()}
        for choice, traced in {"keep": trace.activations, **trace.saving_less}.items()
    }
    return crossings_of(by_choice, affine, trace.short.places(len(trace.short.calls.sequence) + 1))


def traced_choices(choices: Sequence[str]) -> tuple[str, ...]:
    """What has to be traced to know all that blocks may do."""
    wanted = {choice.removesuffix("_offload") for choice in choices}
    return tuple(choice for choice in ("recompute", "offload") if choice in wanted)


def _saving_less(kept: Sequence[Segment], traced: Traced, first: int, before: Mapping[int, int]) -> list[Segment]:
    found = []
    for index, segment in enumerate(kept, start=first):
        evaluation_bytes = segment.evaluation_bytes  # there is no backward to save for
        fields = {**segment_bytes(traced, index, before), "evaluation_bytes": evaluation_bytes}
        found.append(replace(segment, **fields))
        before = {size: num_bytes + traced[size][index].saved_bytes for size, num_bytes in before.items()}
    return found


def _saved(segments: Sequence[Segment]) -> Affine:
    return sum((segment.saved_bytes for segment in segments), ZERO)


def _with_inputs_away(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The block's inputs live while its forward runs, and again from when that is run again to the end."""
    inputs = _saved(segments)
    return tuple(
        replace(
            segment,
            saved_bytes=ZERO,
            forward_workspace_bytes=segment.forward_workspace_bytes + inputs,
            backward_workspace_bytes=segment.backward_workspace_bytes + inputs,
            rerun_workspace_bytes=segment.rerun_workspace_bytes + inputs,
        )
        for segment in segments
    )
