"""The parts of a model's profile, from what was traced and timed of its step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.profile import (
    BlockProfile,
    Crossing,
    Cut,
    OperatorProfile,
    ParameterProfile,
    Rerun,
    Segment,
    Span,
)
from lightning_osdp.profiler.optimizer import OptimizedParameter
from lightning_osdp.profiler.precision import ComputePrecision
from lightning_osdp.profiler.step_time import Seconds
from lightning_osdp.profiler.tracing.calls import Flow
from lightning_osdp.profiler.tracing.operators import Operator
from lightning_osdp.profiler.tracing.saved_bytes import Activations
from lightning_osdp.profiler.tracing.trace import Trace
from lightning_osdp.splitting import cut_dims, splittable

_WORKSPACES = ("forward_workspace_bytes", "backward_workspace_bytes", "rerun_workspace_bytes")
_AFFINE_BYTES = ("saved_bytes", "handed_bytes", "evaluation_bytes", *_WORKSPACES)
"""Fields of both `Activations` and `Segment`."""


def profile_operators(
    module: nn.Module,
    operators: Sequence[Operator],
    trace: Trace,
    optimized: Mapping[nn.Parameter, OptimizedParameter],
    precision: ComputePrecision,
) -> tuple[OperatorProfile, ...]:
    """Operators with their parameters, and how they can be split."""
    positions = {parameter: index for index, parameter in enumerate(module.parameters())}
    features = splittable(module)
    batch_size = next(iter(trace.activations))
    profiles = []
    for operator in operators:
        is_exempt = precision.is_exempt(operator.module)
        dtype, reduce_dtype = (None, None) if is_exempt else (precision.dtype, precision.reduce_dtype)
        trainable = [p for p in operator.parameters if p.requires_grad]
        profiles.append(
            OperatorProfile(
                name=operator.name,
                kind=type(operator.module).__name__,
                enclosing=operator.enclosing,
                signature=operator.signature,
                stands_alone=is_exempt,
                num_trainable=sum(p.numel() for p in trainable),
                parameter_bytes=bytes_of(operator.parameters),
                gathered_bytes=bytes_of(operator.parameters, dtype),
                trainable_bytes=bytes_of(trainable),
                gradient_bytes=bytes_of(operator.gradients, dtype),
                optimizer_bytes=sum(optimized[p].state_bytes for p in trainable if p in optimized),
                parameters=tuple(
                    ParameterProfile(
                        position=positions[p],
                        num_elements=p.numel(),
                        itemsize=p.element_size(),
                        gathered_itemsize=_itemsize(p, dtype),
                        reduced_itemsize=_itemsize(p, reduce_dtype) if reduce_dtype else None,
                        num_rows=p.shape[0] if p.dim() else 1,
                        is_trainable=p.requires_grad,
                        state_bytes_per_element=optimized[p].state_bytes / max(1, p.numel()) if p in optimized else 0.0,
                        group=optimized[p].group if p in optimized else 0,
                        place=optimized[p].place if p in optimized else 0,
                    )
                    for p in operator.parameters
                ),
                dtype=", ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in operator.parameters)),
                cut=_cut(operator, features.get(operator.name), trace.calls.flows, batch_size),
            )
        )
    return tuple(profiles)


def _cut(operator: Operator, num_features: int | None, flows: Mapping[str, Flow], batch_size: int) -> Cut | None:
    """None where it cannot be split, or is not a unit of its own anyway."""
    if num_features is None or operator.enclosing[0] != operator.name or operator.name not in flows:
        return None
    dims, flow = cut_dims(operator.module), flows[operator.name]
    names = {parameter: name for name, parameter in operator.module.named_parameters(recurse=False)}
    return Cut(
        num_features=num_features,
        is_cut=tuple(names[parameter] in dims for parameter in operator.parameters),
        cuts_rows=0 in dims.values(),
        input_bytes=Affine.proportional(batch_size, flow.input_bytes),
        input_gradient_bytes=Affine.proportional(batch_size, flow.input_gradient_bytes),
        output_bytes=Affine.proportional(batch_size, flow.output_bytes),
    )


def bytes_of(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    """Of all of them; where a dtype is given, floating-point ones are counted in it."""
    return sum(t.numel() * _itemsize(t, dtype) for t in tensors)


def _itemsize(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size()


def profile_segments(
    operators: Sequence[Operator], trace: Trace, seconds: Mapping[int, Seconds]
) -> tuple[Segment, ...]:
    """Segments with all blocks keeping what they save.

    Seconds, by micro-batch size, are the mean over segments that are alike: equal operators, followed by equal ones,
    saving as much.
    """
    names = [*trace.calls.sequence, ""]
    signatures = {operator.name: operator.signature for operator in operators if operator.name}
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, name in enumerate(names):
        following = names[index + 1] if index + 1 < len(names) else ""
        saved = tuple(parts[index].saved_bytes for parts in trace.activations.values())
        alike.setdefault((signatures.get(name), signatures.get(following), saved), []).append(index)
    group_of = {index: group for group in alike.values() for index in group}

    def mean_s(index: int, of: Callable[[Seconds], Sequence[float]]) -> Affine:
        group = group_of[index]
        return _affine({size: sum(of(each)[i] for i in group) / len(group) for size, each in seconds.items()})

    before = _saved_before(trace)
    return tuple(
        Segment(
            operator=name,
            forward_s=mean_s(index, lambda each: each.forward_s),
            backward_s=mean_s(index, lambda each: each.backward_s),
            **_segment_bytes({size: parts[index] for size, parts in trace.activations.items()}, before[index]),
        )
        for index, name in enumerate(names)
    )


def _affine(values: Mapping[int, float]) -> Affine:
    """A line over the micro-batch through the values at one or two sizes, exact at the first."""
    (size, exactly), *others = values.items()
    return Affine.through(size, exactly, *others[0]) if others else Affine.proportional(size, exactly)


def _segment_bytes(at: Mapping[int, Activations], saved_before: Mapping[int, int]) -> dict[str, Any]:
    """Those fields of a `Segment` that are bytes, from its trace and the bytes saved by segments before it."""

    def alive(name: str) -> Affine | None:
        """With the bytes saved by this segment and those before it."""
        beside = {size: getattr(part, name) for size, part in at.items()}
        if None in beside.values():
            return None
        return _affine({size: saved_before[size] + part.saved_bytes + beside[size] for size, part in at.items()})

    return {
        **{name: _affine({size: getattr(part, name) for size, part in at.items()}) for name in _AFFINE_BYTES},
        "settled_bytes": alive("settled_bytes"),
        "passed_bytes": alive("passed_bytes"),
    }


def _saved_before(trace: Trace) -> list[dict[int, int]]:
    """For each segment, by micro-batch size: what the segments before it have saved."""
    sums = {size: accumulate((p.saved_bytes for p in parts), initial=0) for size, parts in trace.activations.items()}
    return [dict(zip(sums, before, strict=True)) for before in zip(*sums.values(), strict=True)]


def traced_choices(choices: Sequence[str]) -> tuple[str, ...]:
    """What has to be traced to know all that blocks may do."""
    wanted = {choice.removesuffix("_offload") for choice in choices}
    return tuple(choice for choice in ("recompute", "offload") if choice in wanted)


def profile_blocks(
    trace: Trace, segments: Sequence[Segment], crossings: Sequence[Crossing], choices: Sequence[str]
) -> tuple[BlockProfile, ...]:
    """The blocks of a trace, where these are the segments of the model in which all keep what they save."""
    found, before = [], _saved_before(trace)
    for name, (first, last) in trace.blocks.items():
        kept = segments[first : last + 1]
        ways = {
            choice: _saving_less(kept, traced, first, before[first]) for choice, traced in trace.saving_less.items()
        }
        copied = {"offload": _saved(kept)} if "offload" in ways else {}
        if "recompute" in ways and "recompute_offload" in choices:
            copied["recompute_offload"] = _saved(ways["recompute"])
            ways["recompute_offload"] = _with_inputs_away(ways["recompute"])
        ways = {choice: way for choice, way in ways.items() if choice in choices}
        if ways:
            again = [parts[last].again for parts in trace.saving_less.get("recompute", {}).values()]
            found.append(
                BlockProfile(
                    name=name,
                    span=(first, last),
                    segments=ways,
                    rerun_s=sum((segment.forward_s for segment in kept), ZERO),
                    reruns_early=any(each is not None and each.is_early for each in again),
                    copied_bytes=copied,
                    borrowed_bytes=_borrowed(crossings, (first, last)),
                )
            )
    return tuple(found)


def profile_reruns(trace: Trace, may_be_units: Collection[str]) -> dict[str, Rerun]:
    """What a model that checkpoints itself runs again in backward."""
    found: dict[tuple[int, int, bool], dict[str, None]] = {}
    for index, part in enumerate(next(iter(trace.activations.values()))):
        if part.again is not None:
            key = index - part.again.num_before, index + part.again.num_behind, part.again.is_early
            modules = found.setdefault(key, {})
            for stack in trace.calls.stacks[trace.calls.sequence[index]]:
                modules |= dict.fromkeys(name for name in stack[: part.again.num_modules] if name in may_be_units)
    return {
        f"{first}-{last}": Rerun((first, last), is_early, tuple(modules))
        for (first, last, is_early), modules in found.items()
    }


def _saving_less(
    kept: Sequence[Segment], traced: Mapping[int, Sequence[Activations]], first: int, before: Mapping[int, int]
) -> tuple[Segment, ...]:
    found = []
    for index, segment in enumerate(kept, start=first):
        at = {size: parts[index] for size, parts in traced.items()}
        evaluation_bytes = segment.evaluation_bytes  # there is no backward to save for
        found.append(replace(segment, **{**_segment_bytes(at, before), "evaluation_bytes": evaluation_bytes}))
        before = {size: num_bytes + at[size].saved_bytes for size, num_bytes in before.items()}
    return tuple(found)


def _saved(segments: Sequence[Segment]) -> Affine:
    return sum((segment.saved_bytes for segment in segments), ZERO)


def _with_inputs_away(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The block's inputs live while its forward runs, and again from when that is run again to the end."""
    inputs, away = _saved(segments), []
    for segment in segments:
        workspaces: dict[str, Any] = {name: getattr(segment, name) + inputs for name in _WORKSPACES}
        away.append(replace(segment, saved_bytes=ZERO, **workspaces))
    return tuple(away)


def profile_crossings(trace: Trace) -> tuple[Crossing, ...]:
    """Tensors of a trace that more than one of the blocks and the rest of the model may save."""
    savers: dict[tuple[int, int], dict[str, list[int]]] = {}
    sizes: dict[tuple[int, int], dict[int, float]] = {}
    behind = {place: segment for segment, place in reversed([*enumerate(trace.short.places)])}
    for choice, traced in {"keep": trace.activations, **trace.saving_less}.items():
        for size, parts in traced.items():
            for segment, part in enumerate(parts):
                for (is_near, where, number), num_bytes in part.crossings:
                    name = (segment - where if is_near else behind[where], number)
                    of = savers.setdefault(name, {}).setdefault(choice, [])
                    if segment not in of:
                        of.append(segment)
                    sizes.setdefault(name, {}).setdefault(size, num_bytes)
    return tuple(
        Crossing(_affine(sizes[name]), {choice: tuple(of) for choice, of in found.items()})
        for name, found in savers.items()
        if len({segment for of in found.values() for segment in of}) > 1
    )


def _borrowed(crossings: Sequence[Crossing], span: Span) -> Affine:
    """Bytes that a block saves if it keeps what it saves, but that a block before it is counted for."""
    first, last = span
    kept = ((each.num_bytes, each.savers.get("keep", ())) for each in crossings)
    return sum((num for num, of in kept if of and of[0] < first and any(first <= i <= last for i in of)), ZERO)
