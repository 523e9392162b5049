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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from torch import nn

from lightning_osdp.errors import UntraceableError
from lightning_osdp.profiler.step.run_step import StepRunner, check_loss
from lightning_osdp.profiler.tracing.calls import Calls
from lightning_osdp.profiler.tracing.forward_log import (
    ForwardLog,
    Mark,
    NeedsSavedError,
    Token,
    are_same,
    goes_on,
    logged_forward,
)

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
    start: Mark
    """Of the first block that is left out."""
    end: Mark
    """Of the first behind it that is not."""
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
    places: Sequence[int]
    """For each segment of the full model, the one of the short model that it is, or that stands for it."""
    cuts: tuple[_Cut, ...] = ()

    def applied(self) -> AbstractContextManager[None]:
        """Makes the model the short one for a while."""
        return _without(self.cuts)

    def agrees(self, parts: Sequence[object]) -> bool:
        """Whether blocks that stand for others are alike in these parts, one for each segment of the short model."""
        places = [(self.places[cut.start.num_segments], cut.period) for cut in self.cuts]
        return all(parts[place : place + period] == parts[place - period : place] for place, period in places)

    def unfolded(self, parts: Sequence[T]) -> list[T]:
        """One for each segment of the full model, from one for each of the short one."""
        return [parts[place] for place in self.places]


def short_model(step: StepRunner) -> tuple[Calls, ShortModel] | None:
    """Calls of a model, and the shortest one that does what it does; None where its blocks cannot be compared.

    Raises:
        UntraceableError: the step does not run on fake tensors.
    """
    module = step.module
    blocks = {
        prefix + key: block for prefix, container in _containers(module) for key, block in container.named_children()
    }
    if not blocks:
        return None
    try:
        full = _logged(step, blocks)
    except UntraceableError as error:
        if isinstance(error.__cause__, NeedsSavedError):
            return None
        raise
    cuts = _cuts(module, full)
    if cuts:
        try:
            with _without(cuts):
                short = _logged(step, {})
        except Exception as error:  # a model may count on all of its blocks
            _log.info("OSDP: every block is traced, for without some of them the model fails: %r", error)
        else:
            if _does_the_same(full, cuts, short):
                return full.calls, ShortModel(short.calls, _places(full.calls, cuts), cuts)
    return full.calls, ShortModel(full.calls, _places(full.calls, ()))


def _logged(step: StepRunner, blocks: Mapping[str, nn.Module]) -> ForwardLog:
    """The forward of what the module is now."""
    with step.on_fake_tensors(step.batch_size) as (run, batch), logged_forward(step.module, batch, blocks) as log:
        check_loss(run())
    return log


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


def _cuts(module: nn.Module, full: ForwardLog) -> tuple[_Cut, ...]:
    """In the order of forward; blocks inside of blocks that are left out go with them."""
    places = Counter(id(child) for _, child in module.named_modules(remove_duplicate=False))
    places.update(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    cuts: list[_Cut] = []
    for prefix, container in _containers(module):
        if not any(prefix.startswith(cut.prefix) for cut in cuts):
            cut = _cut(prefix, container, full)
            if cut is not None and all(places[id(part)] == 1 for part in _left_out(cut)):
                cuts.append(cut)
    return tuple(sorted(cuts, key=lambda cut: cut.start))


def _left_out(cut: _Cut) -> Iterator[object]:
    for key, block in cut.container._modules.items():
        if key not in cut.kept and block is not None:
            yield from block.modules()
            yield from block.parameters()


def _cut(prefix: str, container: nn.Module, full: ForwardLog) -> _Cut | None:
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
    return _Cut(
        container=container,
        prefix=prefix,
        kept=dict(zip(keys[:first] + keys[behind:], keys, strict=False)),
        start=start,
        end=end,
        period=(end.num_segments - start.num_segments) // (behind - first),
    )


def _does_the_same(full: ForwardLog, cuts: Sequence[_Cut], short: ForwardLog) -> bool:
    """Whether the short model's forward is the full one's without what was cut."""

    def renamed(name: str) -> str:
        for cut in cuts:
            name = cut.renamed(name)
        return name

    def is_same(token: Token, other: Token) -> bool:
        if isinstance(token, int):
            return other == token - sum(c.end.num_made - c.start.num_made for c in cuts if c.start.num_made <= token)
        return isinstance(token, str) and other == renamed(token)

    operations = _outside(full.operations, [(cut.start.num_operations, cut.end.num_operations) for cut in cuts])
    sequence = _outside(full.calls.sequence, _segments(cuts))
    return (
        [renamed(name) for name in sequence] == short.calls.sequence
        and renamed(full.calls.last) == short.calls.last
        and are_same(operations, short.operations, is_same)
    )


def _places(calls: Calls, cuts: Sequence[_Cut]) -> list[int]:
    """As in `ShortModel`, for a full model with these calls."""
    segments = range(len(calls.sequence) + 1)
    place = {segment: index for index, segment in enumerate(_outside(segments, _segments(cuts)))}
    for cut in cuts:
        for segment in range(cut.start.num_segments, cut.end.num_segments):
            place[segment] = place[segment - cut.period]
    return [place[segment] for segment in segments]


def _segments(cuts: Sequence[_Cut]) -> list[tuple[int, int]]:
    return [(cut.start.num_segments, cut.end.num_segments) for cut in cuts]


def _outside(items: Sequence[T], cuts: Sequence[tuple[int, int]]) -> list[T]:
    left = list(items)
    for start, end in reversed(cuts):
        del left[start:end]
    return left
