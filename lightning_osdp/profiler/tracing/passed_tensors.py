"""Tensors that blocks get and return, and which segments save them: of two that do, the first is counted for it.

Which one that is depends on what each block does with what it saves, so that steps in which all blocks do alike do not
tell of one in which they differ.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.profile import Crossing, Span
from lightning_osdp.profiler.step.tensors import tensors_in


class Saved(NamedTuple):
    """That a segment saves such a tensor."""

    place: tuple[bool, int, int]
    """Where a block first gets or returns it: whether in this block or the one before, so that the segments between are
    told, or else the segment; and its number there."""
    num_bytes: int


@dataclass
class Crossings:
    """Follows tensors through one forward.

    Args:
        now: the segment that forward is in.
        begins: first segments of blocks, ascending.
    """

    now: Callable[[], int]
    begins: Sequence[int]
    _places: dict[int, tuple[int, int]] = field(default_factory=dict)
    _savers: dict[int, dict[int, None]] = field(default_factory=dict)
    _found: list[tuple[tuple[int, int], int, tuple[int, ...]]] = field(default_factory=list)
    _sizes: dict[int, int] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)

    def save(self, storage: torch.UntypedStorage) -> None:
        """The segment saves it."""
        self._follow(storage)
        self._savers[storage._cdata][self.now()] = None

    def cross(self, tree: Any) -> None:
        """A block gets or returns these."""
        for tensor in tensors_in(tree):
            if tensor.layout is torch.strided:
                storage, segment = tensor.untyped_storage(), self.now()
                self._follow(storage)
                number = self._numbers[segment] = self._numbers.get(segment, 0) + 1
                self._places.setdefault(storage._cdata, (segment, number))

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key], self._savers[key] = storage.nbytes(), {}
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        savers, size, place = self._savers.pop(key), self._sizes.pop(key), self._places.pop(key, None)
        if place is not None and savers:
            self._found.append((place, size, tuple(savers)))

    def by_segment(self) -> dict[int, tuple[Saved, ...]]:
        """What each segment saves of them, when forward is over."""
        for key in list(self._sizes):
            if key in self._places and self._savers[key]:
                self._found.append((self._places.pop(key), self._sizes[key], tuple(self._savers[key])))
        saved: dict[int, list[Saved]] = {}
        for (segment, number), size, savers in sorted(self._found):
            for saver in savers:
                block = bisect_right(self.begins, saver) - 2
                is_near = segment >= (self.begins[block] if block >= 0 else 0)
                place = (is_near, saver - segment if is_near else segment, number)
                saved.setdefault(saver, []).append(Saved(place, size))
        return {segment: tuple(found) for segment, found in saved.items()}


@contextmanager
def crossed(module: nn.Module, blocks: Mapping[str, Span], crossings: Crossings) -> Iterator[None]:
    """Tells what blocks get and return."""
    with ExitStack() as cleanup:
        for block in map(module.get_submodule, blocks):
            before, after = partial(_before, crossings), partial(_after, crossings)
            cleanup.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            cleanup.callback(block.register_forward_hook(after).remove)
        yield


def _before(crossings: Crossings, _: nn.Module, args: Any, kwargs: Any) -> None:
    crossings.cross((args, kwargs))


def _after(crossings: Crossings, _: nn.Module, __: Any, output: Any) -> None:
    crossings.cross(output)


Parts = Mapping[int, Sequence[Sequence[Saved]]]
"""By micro-batch size, what each segment saves of such tensors."""


def crossings_of(
    by_choice: Mapping[str, Parts], line: Callable[[Mapping[int, float]], Affine], places: Sequence[int]
) -> tuple[Crossing, ...]:
    """All of a model.

    Args:
        by_choice: of blocks that all do alike.
        line: through values by micro-batch size.
        places: of each segment, the one that was traced in its stead.
    """
    savers: dict[tuple[int, int], dict[str, list[int]]] = {}
    sizes: dict[tuple[int, int], dict[int, float]] = {}
    behind = {place: segment for segment, place in reversed([*enumerate(places)])}
    for choice, parts in by_choice.items():
        for size, segments in parts.items():
            for segment, found in enumerate(segments):
                for (is_near, where, number), num_bytes in found:
                    name = (segment - where if is_near else behind[where], number)
                    of = savers.setdefault(name, {}).setdefault(choice, [])
                    if segment not in of:
                        of.append(segment)
                    sizes.setdefault(name, {}).setdefault(size, num_bytes)
    return tuple(
        Crossing(line(sizes[name]), {choice: tuple(of) for choice, of in found.items()})
        for name, found in savers.items()
        if len({segment for of in found.values() for segment in of}) > 1
    )


def borrowed(crossings: Sequence[Crossing], span: Span) -> Affine:
    """What a block saves where it keeps what it saves, and one before it is counted for."""
    first, last = span
    return sum(
        (
            each.num_bytes
            for each in crossings
            if each.savers.get("keep")
            and each.savers["keep"][0] < first
            and any(first <= i <= last for i in each.savers["keep"])
        ),
        ZERO,
    )
