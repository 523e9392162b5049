"""Parts of a model's profile, from the trace and the times of its step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.axes import LEVELS, SELECTIVE
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.profile import (
    ALIVE_BYTES,
    BlockProfile,
    Crossing,
    Cut,
    Level,
    ModelProfile,
    OperatorProfile,
    ParameterProfile,
    Rerun,
    Segment,
    Span,
)
from lightning_osdp.operations.splitting import cut_dims, inside_compiled, splittable
from lightning_osdp.operations.stationary import refusal_of_one
from lightning_osdp.planner.search.levels import Result, find_levels
from lightning_osdp.profiler.optimizer import OptimizedParameter
from lightning_osdp.profiler.precision import ComputePrecision
from lightning_osdp.profiler.timing.rerun_time import Again, LevelOverhead
from lightning_osdp.profiler.timing.step_time import Seconds
from lightning_osdp.profiler.tracing.calls import Flow
from lightning_osdp.profiler.tracing.operators import Operator
from lightning_osdp.profiler.tracing.saved_bytes import Activations
from lightning_osdp.profiler.tracing.trace import Trace

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
    """Operators with their parameters, and with the dimensions along which they can be split."""
    positions = {parameter: index for index, parameter in enumerate(module.parameters())}
    features = splittable(module)
    batch_size = next(iter(trace.activations))
    profiles = []
    called = {*trace.calls.sequence}
    read = {
        name
        for parts in trace.activations.values()
        for name, part in zip(trace.calls.sequence, parts, strict=False)
        if part.is_read or part.rerun is not None
    }
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
                is_read=operator.name in read or operator.name not in called,
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
    """Cut of an operator; None where it cannot be split, or cannot be a unit of its own."""
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


def profile_exchanges(
    module: nn.Module, operators: Sequence[OperatorProfile], trace: Trace, *, is_followed: bool
) -> tuple[Exchange, ...]:
    """Operators, and pairs of them, whose activations can move in place of their weights.

    Each can be a unit, is trained as a whole, is called once, has no hooks, and is not compiled. An operator with
    features on both sides could move them in two ways: the one that sends fewer bytes is taken. Where the trace has
    not followed what operators are given and give, there are no pairs, and each is taken to save nothing of its input
    for itself: gathered inputs are then predicted to take one input more than they do.
    """
    features, in_graphs = splittable(module), inside_compiled(module)
    may = {
        operator.name
        for operator in operators
        if operator.name in features
        and operator.enclosing[0] == operator.name
        and operator.trainable_bytes == operator.parameter_bytes > 0
        and not operator.stands_alone
        and module.get_submodule(operator.name) not in in_graphs
        and not refusal_of_one(module, operator.name)
    }
    embeddings = {name for name in may if isinstance(module.get_submodule(name), nn.Embedding)}
    if not is_followed:
        alone = {name for name in may - trace.calls.apart if len(trace.calls.spans.get(name, ())) == 1}
        return tuple(
            _by_first_call(each, each.cut, is_embedding=each.name in embeddings)
            for each in operators
            if each.name in alone and each.cut
        )
    sequence, found = trace.calls.sequence, list[Exchange]()
    for index, name in enumerate(sequence):
        at = {size: parts[index] for size, parts in trace.activations.items()}
        if name not in may or any(part.handed is None for part in at.values()):
            continue
        handed = {size: part.handed for size, part in at.items() if part.handed is not None}
        first = handed[next(iter(handed))]
        given = {
            f"{field}_bytes": _affine({size: getattr(each, f"{field}_bytes") for size, each in handed.items()})
            for field in ("input", "input_gradient")
        }
        saved = _affine({size: part.own_saved_bytes for size, part in at.items()})
        made = _affine({size: each.output_bytes for size, each in handed.items()})
        kind = _kind_alone(first.input_bytes, first.output_bytes, is_embedding=name in embeddings)
        found.append(Exchange(kind, (name,), **given, output_bytes=made, saved_bytes=saved))
        places = [index, *(index + each for each in (first.beside, first.feeds) if each is not None)]
        members = tuple(sequence[place] for place in places)
        is_pair = first.feeds is not None and places == sorted(places) and may.issuperset(members)
        of_last = {size: parts[places[-1]].handed for size, parts in trace.activations.items()}
        is_always = len({(each.feeds, each.beside) for each in handed.values()}) == 1 and None not in of_last.values()
        if is_pair and is_always and name not in embeddings:
            saved = _affine({size: part.joint_saved_bytes for size, part in at.items()})
            made = _affine({size: each.output_bytes for size, each in of_last.items() if each is not None})
            found.append(Exchange("pair", members, **given, output_bytes=made, saved_bytes=saved))
    return tuple(found)


def _by_first_call(operator: OperatorProfile, cut: Cut, *, is_embedding: bool) -> Exchange:
    """Exchange of an operator alone, by the bytes of its first call."""
    bytes_of_one = (each.per_sample for each in (cut.input_bytes, cut.output_bytes))
    return Exchange(
        _kind_alone(*bytes_of_one, is_embedding=is_embedding),
        (operator.name,),
        input_bytes=cut.input_bytes,
        input_gradient_bytes=cut.input_gradient_bytes,
        output_bytes=cut.output_bytes,
    )


def _kind_alone(input_bytes: float, output_bytes: float, *, is_embedding: bool) -> str:
    """Kind of the exchange of an operator alone that sends fewer bytes."""
    return "embedding" if is_embedding else "column" if input_bytes <= output_bytes else "row"


def bytes_of(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    """Bytes of all tensors, floating-point tensors as if they had ``dtype`` where that is given."""
    return sum(t.numel() * _itemsize(t, dtype) for t in tensors)


def _itemsize(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size()


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
        return _affine({size: sum(getattr(s, phase)[i] for i in group) / len(group) for size, s in seconds.items()})

    before = _saved_before(trace)
    return tuple(
        Segment(
            operator=name,
            forward_s=mean_s(index, "forward_s"),
            backward_s=mean_s(index, "backward_s"),
            **_segment_bytes({size: parts[index] for size, parts in trace.activations.items()}, before[index]),
        )
        for index, name in enumerate(names)
    )


def _affine(values: Mapping[int, float]) -> Affine:
    """Line through the values at one or two micro-batch sizes, exact at the first."""
    (size, exactly), *others = values.items()
    return Affine.through(size, exactly, *others[0]) if others else Affine.proportional(size, exactly)


def _segment_bytes(at: Mapping[int, Activations], saved_before: Mapping[int, int]) -> dict[str, Any]:
    """Fields of a `Segment` that are bytes, from its trace and the bytes saved by segments before it."""

    def alive(name: str) -> Affine | None:
        """Bytes of the trace and bytes saved by this segment and the segments before it."""
        beside = {size: getattr(part, name) for size, part in at.items()}
        if None in beside.values():
            return None
        return _affine({size: saved_before[size] + part.saved_bytes + beside[size] for size, part in at.items()})

    return {
        **{name: _affine({size: getattr(part, name) for size, part in at.items()}) for name in _AFFINE_BYTES},
        **{name: alive(name) for name in ALIVE_BYTES},
    }


def _saved_before(trace: Trace) -> list[dict[int, int]]:
    """Bytes that the segments before each segment have saved, by micro-batch size."""
    sums = {size: accumulate((p.saved_bytes for p in parts), initial=0) for size, parts in trace.activations.items()}
    return [dict(zip(sums, before, strict=True)) for before in zip(*sums.values(), strict=True)]


def traced_choices(choices: Sequence[str]) -> tuple[str, ...]:
    """Choices of activations that have to be traced to know the bytes of all given ones."""
    wanted = {"recompute" if choice == SELECTIVE else choice.removesuffix("_offload") for choice in choices}
    return tuple(choice for choice in ("recompute", "offload") if choice in wanted)


def profile_blocks(
    trace: Trace,
    segments: Sequence[Segment],
    crossings: Sequence[Crossing],
    choices: Sequence[str],
    *,
    again: Mapping[int, Mapping[str, Again]],
    levels: Mapping[str, BlockLevels],
) -> tuple[BlockProfile, ...]:
    """Blocks of a trace; ``segments`` are those of the model in which all blocks keep what they save.

    Args:
        trace: with the levels that it has been followed at.
        segments: of the model in which all blocks keep what they save.
        crossings: tensors that blocks get or return.
        choices: values of ``saves`` to profile.
        again: work of blocks that recompute, by number of samples; empty: all of forward runs again.
        levels: of each block that has any.
    """
    profiles, before = [], _saved_before(trace)
    for name, (first, last) in trace.blocks.items():
        kept = segments[first : last + 1]
        found = levels.get(name, BlockLevels((), 0.0, 0.0))
        own = dict(zip(LEVELS, found.kept, strict=False))
        ways = {
            choice: _saving_less(kept, traced, first, before[first])
            for choice, traced in trace.saving_less.items()
            if choice not in LEVELS or choice in own
        }
        copied = {"offload": _saved(kept)} if "offload" in ways else {}
        if "recompute" in ways and "recompute_offload" in choices:
            copied["recompute_offload"] = _saved(ways["recompute"])
            ways["recompute_offload"] = _with_inputs_away(ways["recompute"])
        ways = {choice: way for choice, way in ways.items() if choice in choices}
        if ways:
            by_size = {size: of_blocks[name] for size, of_blocks in again.items()}
            reruns = [parts[last].rerun for parts in trace.saving_less.get("recompute", {}).values()]
            profiles.append(
                BlockProfile(
                    name=name,
                    span=(first, last),
                    segments=ways,
                    rerun_s=_rerun_s(kept, by_size),
                    levels={
                        level: Level(
                            kept=positions, rerun_s=_rerun_s(kept, by_size, positions) + Affine(found.overhead_s)
                        )
                        for level, positions in own.items()
                        if level in ways
                    },
                    level_gap=found.gap if any(level in ways for level in own) else 0.0,
                    reruns_early=any(each is not None and each.is_early for each in reruns),
                    copied_bytes=copied,
                    borrowed_bytes=_borrowed(crossings, (first, last)),
                )
            )
    return tuple(profiles)


def _rerun_s(segments: Sequence[Segment], again: Mapping[int, Again], kept: Collection[int] = ()) -> Affine:
    """Seconds of a block's second forward with results kept at these positions, from its work by number of samples."""
    if not again:
        return sum((segment.forward_s for segment in segments), ZERO)
    return _affine({size: _rerun_s_at(segments, size, work, kept) for size, work in again.items()})


def _rerun_s_at(segments: Sequence[Segment], size: int, work: Again, kept: Collection[int]) -> float:
    forward_s = [segment.forward_s.at(size) for segment in segments]
    saved_s = sum(forward_s[work.results[each].segment] * work.results[each].share for each in kept)
    again_s = sum(seconds * share for seconds, share in zip(forward_s, work.shares, strict=True))
    return max(0.0, again_s - saved_s)


class BlockLevels(NamedTuple):
    """`Levels` of a block, and seconds that any of them takes beside what runs again."""

    kept: tuple[tuple[int, ...], ...]
    gap: float
    overhead_s: float


def levels_of_blocks(
    trace: Trace,
    segments: Sequence[Segment],
    again: Mapping[str, Again],
    size: int,
    overhead: Callable[[], LevelOverhead],
    *,
    has_device: bool,
) -> dict[str, BlockLevels]:
    """Levels of each block of a trace, from its work with ``size`` samples; blocks that do the same have the same.

    Args:
        trace: with blocks that recompute.
        segments: of the model in which all blocks keep what they save.
        again: work of each block.
        size: number of samples.
        overhead: called once, and only if a block has levels without any.
        has_device: whether the host does not compute itself.
    """
    found: dict[Hashable, BlockLevels] = {}
    overhead = cache(overhead)
    for name, (first, last) in trace.blocks.items():
        work = again[name]
        if work.kind not in found:
            own = segments[first : last + 1]
            kept_bytes, least_bytes = (
                sum(part.saved_bytes for part in of[size][first : last + 1])
                for of in (trace.activations, trace.saving_less["recompute"])
            )
            computing_s = sum((segment.forward_s + segment.backward_s).at(size) for segment in own)
            find = partial(
                find_levels,
                [
                    Result(own[each.segment].forward_s.at(size) * each.share, float(each.num_bytes))
                    for each in work.results
                ],
                nothing_s=_rerun_s_at(own, size, work, ()),
                everything_bytes=float(kept_bytes - least_bytes),
                most=len(LEVELS),
            )
            levels, overhead_s = find(), 0.0
            if levels.kept:
                overhead_s = overhead().seconds(work.num_operations, computing_s if has_device else 0.0)
                levels = find(overhead_s=overhead_s)
            found[work.kind] = BlockLevels(*levels, overhead_s)
    return {name: found[again[name].kind] for name in trace.blocks}


def known_levels(profile: ModelProfile) -> dict[str, BlockLevels]:
    """Levels of the blocks of a profile; seconds that they take beside what runs again are not in it."""
    return {
        block.name: BlockLevels(tuple(level.kept for level in block.levels.values()), block.level_gap, 0.0)
        for block in profile.blocks
    }


def profile_reruns(trace: Trace, may_be_units: Collection[str]) -> dict[str, Rerun]:
    """Parts of forward that a model's own checkpointing runs again in backward, by their segments."""
    reruns: dict[tuple[int, int, bool], dict[str, None]] = {}
    for index, part in enumerate(next(iter(trace.activations.values()))):
        if part.rerun is not None:
            key = index - part.rerun.num_before, index + part.rerun.num_behind, part.rerun.is_early
            modules = reruns.setdefault(key, {})
            for stack in trace.calls.stacks[trace.calls.sequence[index]]:
                modules |= dict.fromkeys(name for name in stack[: part.rerun.num_modules] if name in may_be_units)
    return {
        f"{first}-{last}": Rerun((first, last), is_early, tuple(modules))
        for (first, last, is_early), modules in reruns.items()
    }


def _saving_less(
    kept: Sequence[Segment], traced: Mapping[int, Sequence[Activations]], first: int, before: Mapping[int, int]
) -> tuple[Segment, ...]:
    """Segments of a block in another choice than ``keep``, from the trace of that choice and those kept."""
    changed = []
    for index, segment in enumerate(kept, start=first):
        at = {size: parts[index] for size, parts in traced.items()}
        evaluation_bytes = segment.evaluation_bytes  # evaluation has no backward, so the choice does not matter
        changed.append(replace(segment, **{**_segment_bytes(at, before), "evaluation_bytes": evaluation_bytes}))
        before = {size: num_bytes + at[size].saved_bytes for size, num_bytes in before.items()}
    return tuple(changed)


def _saved(segments: Sequence[Segment]) -> Affine:
    return sum((segment.saved_bytes for segment in segments), ZERO)


def _with_inputs_away(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Segments of ``recompute_offload``: the block's inputs live while its forward runs, the first time and again."""
    inputs, away = _saved(segments), []
    for segment in segments:
        workspaces: dict[str, Any] = {name: getattr(segment, name) + inputs for name in _WORKSPACES}
        away.append(replace(segment, saved_bytes=ZERO, **workspaces))
    return tuple(away)


def profile_crossings(trace: Trace) -> tuple[Crossing, ...]:
    """Tensors of a trace that more than one of the blocks and the rest of the model may save."""
    savers: dict[tuple[int, int], dict[str, dict[int, None]]] = {}
    sizes: dict[tuple[int, int], dict[int, float]] = {}
    behind = {place: segment for segment, place in reversed([*enumerate(trace.short.places)])}
    for choice, traced in {"keep": trace.activations, **trace.saving_less}.items():
        for size, parts in traced.items():
            for segment, part in enumerate(parts):
                for (is_near, where, number), num_bytes in part.crossings:
                    name = (segment - where if is_near else behind[where], number)
                    savers.setdefault(name, {}).setdefault(choice, {})[segment] = None
                    sizes.setdefault(name, {}).setdefault(size, num_bytes)
    return tuple(
        Crossing(_affine(sizes[name]), {choice: tuple(segments) for choice, segments in by_choice.items()})
        for name, by_choice in savers.items()
        if len({segment for segments in by_choice.values() for segment in segments}) > 1
    )


def _borrowed(crossings: Sequence[Crossing], span: Span) -> Affine:
    """Bytes that a block's backward needs if it keeps what it saves, but that a block before is counted for."""
    first, last = span
    borrowed = ZERO
    for crossing in crossings:
        savers = crossing.savers.get("keep", ())
        if savers and savers[0] < first and any(first <= segment <= last for segment in savers):
            borrowed += crossing.num_bytes
    return borrowed
