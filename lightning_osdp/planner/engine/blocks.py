"""Profiles of models whose blocks recompute or offload what they save for backward.

Bytes of a block's segments in such a choice are measured. In forward the segments save the block's inputs or nothing;
in backward the tensors that they would have saved live again, as workspace. Seconds are not measured: recomputing a
block takes the seconds of its forward once more as far as it runs again, before its backward begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.axes import KEEP, Treatment
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.profile import BlockProfile, ModelProfile, Rerun, Segment, Span
from lightning_osdp.core.step import Step
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.engine.effects import block_effects, effects_of
from lightning_osdp.planner.engine.exchanges import with_exchanges

StepKind = TypeVar("StepKind", bound=Step)


def with_activations(profile: ModelProfile, activations: Mapping[str, str]) -> ModelProfile:
    """Profile in which each block named makes a choice other than ``keep``; the result has no blocks to choose for.

    Args:
        profile: the model with blocks that keep what they save.
        activations: block -> value of ``saves``.

    Raises:
        ConfigurationError: there is no such block, or this choice was not profiled for it.
    """
    chosen = {name: choice for name, choice in activations.items() if choice != KEEP}
    if not chosen:
        return profile
    _check(profile, chosen)
    segments: list[Segment] = []
    rerun = dict(profile.rerun)
    copied: list[tuple[Span, Affine]] = []
    modules: dict[str, list[str]] = {name: [] for name in chosen}
    for name in profile.spans:
        for end, letter in enumerate(name):
            if letter == "." and name[:end] in modules:
                modules[name[:end]].append(name)
    more = ZERO
    """Bytes that the blocks so far save beyond those that they would have saved with ``keep``."""
    for block in (block for block in profile.blocks if block.name in chosen):
        (first, last), choice = block.span, chosen[block.name]
        segments += [segment.behind(more) for segment in profile.segments[len(segments) : first]]
        effects = block_effects(block, choice)
        inside = [segment.behind(more) for segment in block.segments[choice]]
        segments += list(_with_recomputed(profile, block, choice, inside)) if effects.reruns else inside
        more -= freed_bytes(profile, block, choice)
        if effects.reruns:
            segments[last] = replace(segments[last], backward_s=segments[last].backward_s + effects.rerun_s)
            rerun[block.name] = Rerun(block.span, block.reruns_early, tuple(modules[block.name]))
        if effects.copied_bytes != ZERO:
            copied.append((block.span, effects.copied_bytes))
    segments += [segment.behind(more) for segment in profile.segments[len(segments) :]]
    segments = _saved_once(segments, profile, chosen)
    return replace(
        profile, segments=tuple(segments), blocks=(), crossings=(), rerun=_outermost(rerun), copied=tuple(copied)
    )


def _outermost(rerun: Mapping[str, Rerun]) -> dict[str, Rerun]:
    """Parts that no other part surrounds: units of an inner part are gathered for the outer one, and stay gathered."""
    outer, end = set[str](), -1
    for name, again in sorted(rerun.items(), key=lambda item: (item[1].span[0], -item[1].span[1])):
        if again.span[1] > end:
            outer.add(name)
            end = again.span[1]
    longest_first = sorted(rerun.items(), key=lambda item: item[1].span[0] - item[1].span[1])
    return {name: again for name, again in longest_first if name in outer}


def _with_recomputed(
    profile: ModelProfile, block: BlockProfile, choice: str, segments: Sequence[Segment]
) -> Iterator[Segment]:
    """Segments of a block that runs again, with the bytes that they make again.

    The block's inputs are not made, nor are results that a level keeps.
    """
    first, last = block.span
    inputs = [ZERO] * (last + 1 - first)
    for crossing in profile.crossings:
        saver = crossing.savers.get(KEEP, (-1,))[0]
        if first <= saver <= last and any(first <= index <= last for index in crossing.savers.get(choice, ())):
            inputs[saver - first] += crossing.num_bytes
    all_again = block.segments.get("recompute", segments) if choice in block.levels else segments
    before = ZERO
    for segment, kept, again, given in zip(
        segments, profile.segments[first : last + 1], all_again, inputs, strict=True
    ):
        made = kept.saved_bytes - given
        if choice in block.levels:
            made = made.less(segment.saved_bytes.less(again.saved_bytes))
        yield replace(segment, made_again_bytes=made, made_before_bytes=before)
        before += made


def _saved_once(segments: Sequence[Segment], profile: ModelProfile, chosen: Mapping[str, str]) -> list[Segment]:
    """Moves the bytes of each tensor that crosses blocks to the first segment that saves the tensor with these choices.

    Before, these bytes are at the first segment that saves the tensor if all blocks make the choice of its own block.
    """
    choices = [KEEP] * len(segments)
    for block in profile.blocks:
        first, last = block.span
        choices[first : last + 1] = [chosen.get(block.name, KEEP)] * (last + 1 - first)
    more = [ZERO] * len(segments)
    for crossing in profile.crossings:
        having = {savers[0] for choice, savers in crossing.savers.items() if savers and choices[savers[0]] == choice}
        saving = [i for choice, savers in crossing.savers.items() for i in savers if choices[i] == choice]
        for index in having.difference([min(saving, default=-1)]):
            more[index] -= crossing.num_bytes
        if saving and min(saving) not in having:
            more[min(saving)] += crossing.num_bytes
    so_far, found = ZERO, []
    for segment, here in zip(segments, more, strict=True):
        so_far += here
        moved = segment.behind(so_far)
        found.append(moved if here == ZERO else replace(moved, saved_bytes=segment.saved_bytes + here))
    return found


def in_modes(step: StepKind, modes: Sequence[Treatment]) -> StepKind:
    """Step whose blocks and exchanges do what the modes of their units say; the given one where they do nothing."""
    chosen = {unit.name: mode["saves"] for unit, mode in zip(step.units, modes, strict=True)}
    profile = with_activations(step.profile, chosen)
    found = step if profile is step.profile else replace(step, profile=profile)
    moving = moving_activations(step, modes)
    return replace(found, profile=with_exchanges(found, moving)) if moving else found


def moving_activations(step: Step, modes: Sequence[Treatment]) -> dict[Exchange, int]:
    """Exchanges of the units whose activations move in these modes, each with the number of ranks that take part.

    Raises:
        ConfigurationError: a unit is to move activations and cannot.
    """
    found = {}
    for unit, mode in zip(step.units, modes, strict=True):
        effects = effects_of(mode)
        if effects.exchanges:
            if unit.exchange is None:
                raise ConfigurationError(
                    f"Expected unit {unit.name!r} to move weights, for no exchange of its activations was profiled, or"
                    " it is run again in backward, got one that moves activations. Plan anew."
                )
            found[unit.exchange] = step.cluster.num_ranks(effects.sharded_over)
    return found


def _check(profile: ModelProfile, chosen: Mapping[str, str]) -> None:
    blocks = {block.name: block for block in profile.blocks}
    for name, choice in chosen.items():
        if name not in blocks or choice not in blocks[name].segments:
            raise ConfigurationError(
                f"Expected block {name!r} to be one that was profiled with activations={choice!r}, got those of"
                f" {[block.name for block in profile.blocks if choice in block.segments]}."
            )


def stays_bytes(block: BlockProfile, choice: str) -> Affine:
    """Bytes that stay on the device from the block's forward to its backward in a choice other than ``keep``."""
    return sum((segment.saved_bytes for segment in block.segments[choice]), ZERO)


def freed_bytes(profile: ModelProfile, block: BlockProfile, choice: str) -> Affine:
    """Bytes of one of the profile's blocks that do not stay on the device from its forward to its backward."""
    first, last = block.span
    kept = sum((segment.saved_bytes for segment in profile.segments[first : last + 1]), ZERO)
    return kept - stays_bytes(block, choice)
