"""Equal blocks in a row: a few stand for all, so that following a step takes as long at any depth.

Whoever follows a step may follow that of a *short model*, the same module with most of its repeated blocks taken out
of their container, and read off what the full one would give. Which ones may go is not guessed from the looks of
modules. The first forward runs all of them, and its operations are compared: those from the beginning of a block to
that of the next must be those of the block before, on the same tensors as seen from the block, and leave nothing alive.
Then the forward of the short model must be that of the full one with these operations left out. Last, two of the blocks
that stay must agree in everything that is measured; the others are taken to be as these.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from torch import nn

from lightning_osdp.profiler.equal_blocks.forward import Forward, are_same, goes_on
from lightning_osdp.profiler.equal_blocks.operation_log import Token
from lightning_osdp.profiler.tracing.calls import Calls

T = TypeVar("T")
_log = logging.getLogger(__name__)

_NUM_FIRST = 3
"""Of equal blocks those that stay at the beginning; the last two of them must agree. At the end one stays."""
_LEAST_CUT = 4
"""Fewer blocks are not worth it."""


@dataclass(frozen=True)
class _Cut:
    """Blocks of one container that are taken out."""

    container: nn.Module
    prefix: str
    """Of the names of its blocks."""
    kept: dict[str, str]
    """Key of a block that stays -> its key in the short model."""
    operations: tuple[int, int]
    """First that is left out, first behind that is not; and so below."""
    made: tuple[int, int]
    segments: tuple[int, int]
    period: int
    """Segments of a block."""

    def renamed(self, name: str) -> str:
        """A name in the short model."""
        if not name.startswith(self.prefix):
            return name
        key, dot, rest = name.removeprefix(self.prefix).partition(".")
        return f"{self.prefix}{self.kept.get(key, f'({key} left out)')}{dot}{rest}"


@dataclass(frozen=True)
class ShortModel:
    """What stands for a model: itself with some blocks taken out of it; or all of it, where none can be."""

    calls: Calls
    """Of the short model."""
    cuts: tuple[_Cut, ...] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Makes the model the short one for a while."""
        with _without(self.cuts):
            yield

    def agrees(self, parts: Sequence[object]) -> bool:
        """Whether blocks that stand for others are alike in these parts, one for each segment of the short model."""
        places = [(self._place(cut.segments[0]), cut.period) for cut in self.cuts]
        return all(parts[place : place + period] == parts[place - period : place] for place, period in places)

    def unfolded(self, parts: Sequence[T]) -> list[T]:
        """One for each segment of the full model, from one for each of the short one."""
        return [parts[place] for place in self.places(len(parts))]

    def places(self, num_segments: int) -> list[int]:
        """For each segment of the full model, its place among the so many of the short one."""
        num_cut = sum(end - start for start, end in (cut.segments for cut in self.cuts))
        return [self._place(segment) for segment in range(num_segments + num_cut)]

    def _place(self, segment: int) -> int:
        """Of a segment in the short model, or of the one that stands for it."""
        shift = 0
        for cut in self.cuts:
            start, end = cut.segments
            if start <= segment < end:
                return start - shift - cut.period + (segment - start) % cut.period
            shift += (end - start) * (segment >= end)
        return segment - shift


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Those that may be left out, by name: what lies in one container with enough others."""
    return {
        prefix + key: block for prefix, container in _containers(module) for key, block in container.named_children()
    }


def short_model(module: nn.Module, full: Forward, record: Callable[[], Forward]) -> ShortModel:
    """The shortest model that does what the full one does.

    Args:
        module: the full model.
        full: its forward.
        record: the forward of what the module is when it is called.
    """
    cuts = _cuts(module, full)
    if cuts:
        try:
            with _without(cuts):
                forward = record()
        except Exception as error:  # a model may count on all of its blocks
            _log.info("OSDP: every block is traced, for without some of them the model fails: %r", error)
        else:
            if _does_the_same(full, cuts, forward):
                return ShortModel(forward.calls, cuts)
    return ShortModel(full.calls)


@contextmanager
def _without(cuts: Sequence[_Cut]) -> Iterator[None]:
    before = [(cut.container._modules, dict(cut.container._modules)) for cut in cuts]
    try:
        for cut, (modules, blocks) in zip(cuts, before, strict=True):
            modules.clear()
            modules.update({new: blocks[old] for old, new in cut.kept.items()})
        yield
    finally:
        for modules, blocks in before:
            modules.clear()
            modules.update(blocks)


def _containers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those that may hold enough equal blocks, by the prefix of their names."""
    least = _NUM_FIRST + _LEAST_CUT + 2
    for name, child in module.named_modules():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) >= least:
            yield f"{name}." if name else "", child


def _cuts(module: nn.Module, full: Forward) -> tuple[_Cut, ...]:
    """In the order of forward; blocks inside of blocks that are left out go with them."""
    places = Counter(id(child) for _, child in module.named_modules(remove_duplicate=False))
    places.update(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    cuts: list[_Cut] = []
    for prefix, container in _containers(module):
        if not any(prefix.startswith(cut.prefix) for cut in cuts):
            cut = _cut(prefix, container, full)
            if cut is not None and all(places[id(part)] == 1 for part in _left_out(cut)):
                cuts.append(cut)
    return tuple(sorted(cuts, key=lambda cut: cut.segments))


def _left_out(cut: _Cut) -> Iterator[object]:
    for key, block in cut.container._modules.items():
        if key not in cut.kept and block is not None:
            yield from block.modules()
            yield from block.parameters()


def _cut(prefix: str, container: nn.Module, full: Forward) -> _Cut | None:
    """The longest run of blocks that are alike, all but those that stay."""
    keys = list(container._modules)
    blocks = [prefix + key for key in keys]
    begins = [full.marks[block].num_operations for block in blocks if len(full.calls.spans.get(block, ())) == 1]
    if len(begins) < len(blocks) or begins != sorted(begins):
        return None
    alike = [goes_on(full, *blocks[index : index + 3]) for index in range(len(blocks) - 2)]
    runs = [[*run] for is_alike, run in groupby(range(len(alike)), alike.__getitem__) if is_alike]
    longest = max(runs, key=len, default=[])
    if len(longest) < _NUM_FIRST + _LEAST_CUT:
        return None
    first, behind = longest[0] + _NUM_FIRST, longest[-1] + 1
    start, end = full.marks[blocks[first]], full.marks[blocks[behind]]
    segments = full.first_segment(blocks[first]), full.first_segment(blocks[behind])
    return _Cut(
        container=container,
        prefix=prefix,
        kept=dict(zip(keys[:first] + keys[behind:], keys, strict=False)),
        operations=(start.num_operations, end.num_operations),
        made=(start.num_made, end.num_made),
        segments=segments,
        period=(segments[1] - segments[0]) // (behind - first),
    )


def _does_the_same(full: Forward, cuts: Sequence[_Cut], short: Forward) -> bool:
    """Whether the short model's forward is the full one's without what was cut."""

    def renamed(name: str) -> str:
        for cut in cuts:
            name = cut.renamed(name)
        return name

    def is_same(token: Token, other: Token) -> bool:
        if isinstance(token, int):
            return other == token - sum(end - start for start, end in (cut.made for cut in cuts) if start <= token)
        return isinstance(token, str) and other == renamed(token)

    operations = _outside(full.operations, [cut.operations for cut in cuts])
    sequence = _outside(full.calls.sequence, [cut.segments for cut in cuts])
    return (
        [renamed(name) for name in sequence] == short.calls.sequence
        and renamed(full.calls.last) == short.calls.last
        and are_same(operations, short.operations, is_same)
    )


def _outside(items: Sequence[T], cuts: Sequence[tuple[int, int]]) -> list[T]:
    left = list(items)
    for start, end in reversed(cuts):
        del left[start:end]
    return left
