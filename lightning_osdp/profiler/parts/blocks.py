"""Blocks of a profile: segments and seconds in each choice for what they save, levels, and tensors between blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.axes import LEVELS, SELECTIVE
from lightning_osdp.core.profile import (
    BlockProfile,
    Crossing,
    Level,
    ModelProfile,
    Rerun,
    Segment,
    Span,
)
from lightning_osdp.planner.search.levels import Result, find_levels
from lightning_osdp.profiler.parts.segments import WORKSPACES, affine, bytes_saved_before, segment_bytes
from lightning_osdp.profiler.timing.rerun_time import Again, LevelOverhead
from lightning_osdp.profiler.tracing.saved_bytes import Activations
from lightning_osdp.profiler.tracing.trace import Trace


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
    profiles, before = [], bytes_saved_before(trace)
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
    return affine({size: _rerun_s_at(segments, size, work, kept) for size, work in again.items()})


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
        changed.append(replace(segment, **{**segment_bytes(at, before), "evaluation_bytes": evaluation_bytes}))
        before = {size: num_bytes + at[size].saved_bytes for size, num_bytes in before.items()}
    return tuple(changed)


def _saved(segments: Sequence[Segment]) -> Affine:
    return sum((segment.saved_bytes for segment in segments), ZERO)


def _with_inputs_away(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Segments of ``recompute_offload``: the block's inputs live while its forward runs, the first time and again."""
    inputs, away = _saved(segments), []
    for segment in segments:
        workspaces: dict[str, Any] = {name: getattr(segment, name) + inputs for name in WORKSPACES}
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
        Crossing(affine(sizes[name]), {choice: tuple(segments) for choice, segments in by_choice.items()})
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
