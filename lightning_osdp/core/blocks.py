"""What a profile becomes where blocks recompute or offload what they save for backward.

A block's segments in such a choice are measured: in forward they save its inputs or nothing, and in backward what they
save besides lives again while the block's backward runs, as workspace. What is not measured is time: recomputing a
block takes its forward once more, before its backward begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.axes import RERUN
from lightning_osdp.core.profile import BlockProfile, ModelProfile, Rerun, Segment, Span
from lightning_osdp.errors import ConfigurationError


def with_activations(profile: ModelProfile, activations: Mapping[str, str]) -> ModelProfile:
    """The profile with these choices for these blocks, in place of keeping what they save.

    It has no blocks any more, for which there would be something to choose.

    Raises:
        ConfigurationError: there is no such block, or this choice was not profiled for it.
    """
    chosen = {name: choice for name, choice in activations.items() if choice != "keep"}
    if not chosen:
        return profile
    _check(profile, chosen)
    segments: list[Segment] = []
    rerun = dict(profile.rerun)
    copied: list[tuple[Span, Affine]] = []
    fewer = ZERO
    """Bytes that the blocks so far do not have saved."""
    for block in (block for block in profile.blocks if block.name in chosen):
        (first, last), choice = block.span, chosen[block.name]
        segments += [_beginning_with_less(segment, fewer) for segment in profile.segments[len(segments) : first]]
        own = [_beginning_with_less(segment, fewer) for segment in block.segments[choice]]
        segments += list(_made_again(profile, block.span, own)) if choice in RERUN else own
        fewer += freed_bytes(profile, block, choice)
        if choice in RERUN:
            segments[last] = replace(segments[last], backward_s=segments[last].backward_s + block.rerun_s)
            inside = tuple(name for name in profile.spans if name.startswith(f"{block.name}."))
            rerun[block.name] = Rerun(block.span, block.reruns_early, inside)
        if choice in block.copied_bytes:
            copied.append((block.span, block.copied_bytes[choice]))
    segments += [_beginning_with_less(segment, fewer) for segment in profile.segments[len(segments) :]]
    segments = _saved_once(segments, profile, chosen)
    return replace(
        profile, segments=tuple(segments), blocks=(), crossings=(), rerun=_outermost(rerun), copied=tuple(copied)
    )


def _outermost(rerun: Mapping[str, Rerun]) -> dict[str, Rerun]:
    """Without what is inside of another: its units are gathered for that one, and stay gathered."""
    found: dict[str, Rerun] = {}
    for name, again in sorted(rerun.items(), key=lambda item: item[1].span[0] - item[1].span[1]):
        if not any(around.surrounds(*again.span) for around in found.values()):
            found[name] = again
    return found


def _made_again(profile: ModelProfile, span: Span, segments: Sequence[Segment]) -> Iterator[Segment]:
    """With what a block that runs again makes again, its inputs apart."""
    first, last = span
    inputs = [ZERO] * (last + 1 - first)
    for crossing in profile.crossings:
        own = crossing.savers.get("keep", (-1,))[0]
        if first <= own <= last and any(first <= index <= last for index in crossing.savers.get("recompute", ())):
            inputs[own - first] += crossing.num_bytes
    before = ZERO
    for segment, kept, given in zip(segments, profile.segments[first : last + 1], inputs, strict=True):
        made = kept.saved_bytes - given
        yield replace(segment, made_again_bytes=made, made_before_bytes=before)
        before += made


def _saved_once(segments: Sequence[Segment], profile: ModelProfile, chosen: Mapping[str, str]) -> list[Segment]:
    """Books what crosses from one block to another where the first one saves it that does so with these choices.

    Segments have it where that is if all blocks do as their own.
    """
    choices = ["keep"] * len(segments)
    for block in profile.blocks:
        first, last = block.span
        choices[first : last + 1] = [chosen.get(block.name, "keep")] * (last + 1 - first)
    more = [ZERO] * len(segments)
    for crossing in profile.crossings:
        having = {savers[0] for choice, savers in crossing.savers.items() if savers and choices[savers[0]] == choice}
        saving = [i for choice, savers in crossing.savers.items() for i in savers if choices[i] == choice]
        for index in having.difference([min(saving, default=-1)]):
            more[index] -= crossing.num_bytes
        if saving and min(saving) not in having:
            more[min(saving)] += crossing.num_bytes
    fewer = ZERO
    found = []
    for segment, here in zip(segments, more, strict=True):
        fewer -= here
        moved = _beginning_with_less(segment, fewer)
        found.append(moved if here == ZERO else replace(moved, saved_bytes=segment.saved_bytes + here))
    return found


def _check(profile: ModelProfile, chosen: Mapping[str, str]) -> None:
    blocks = {block.name: block for block in profile.blocks}
    for name, choice in chosen.items():
        if name not in blocks or choice not in blocks[name].segments:
            raise ConfigurationError(
                f"Expected block {name!r} to be one that was profiled with activations={choice!r}, got those of"
                f" {[block.name for block in profile.blocks if choice in block.segments]}."
            )


def _beginning_with_less(segment: Segment, fewer: Affine) -> Segment:
    """A segment that begins with so many bytes fewer saved."""
    if fewer == ZERO:
        return segment
    settled, passed = (
        None if alive is None else alive - fewer for alive in (segment.settled_bytes, segment.passed_bytes)
    )
    return replace(segment, settled_bytes=settled, passed_bytes=passed)


def stays_bytes(block: BlockProfile, choice: str) -> Affine:
    """Bytes that stay on the device from the block's forward to its backward in a choice other than ``keep``."""
    return sum((segment.saved_bytes for segment in block.segments[choice]), ZERO)


def freed_bytes(profile: ModelProfile, block: BlockProfile, choice: str) -> Affine:
    """Bytes of one of the profile's blocks that do not stay on the device from its forward to its backward."""
    first, last = block.span
    kept = sum((segment.saved_bytes for segment in profile.segments[first : last + 1]), ZERO)
    return kept - stays_bytes(block, choice)
