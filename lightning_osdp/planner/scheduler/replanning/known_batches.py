"""Known batches: shapes for which it is known which of a few plans have room, as a value that all ranks have alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Dtype and shape of each tensor of a batch, in their order."""


def times_longer(shapes: Shapes, known: Shapes) -> float:
    """Factor by which a batch is longer than a known one, at least 1; infinite where it has other tensors.

    Factors of the dimensions of a tensor are multiplied, and the tensor with the largest product counts.

    Example:
        >>> times_longer((("int64", (4, 96)),), (("int64", (8, 64)),))
        1.5
    """
    if [(dtype, len(shape)) for dtype, shape in shapes] != [(dtype, len(shape)) for dtype, shape in known]:
        return math.inf
    pairs = zip(shapes, known, strict=True)
    products = (
        math.prod(max(1.0, size / max(1, before)) for size, before in zip(shape, known_shape, strict=True))
        for (_, shape), (_, known_shape) in pairs
    )
    return max(products, default=1.0)


class Room(NamedTuple):
    """Factors by which a batch may be longer than a known one, see `room_for_longer`; 0 if not even that one fits."""

    training: float
    evaluating: float
    """Factor in a forward without gradients."""

    def below(self, times: float) -> Room:
        """Room where a batch so many times longer has turned out to be too long."""
        if self.training < times:
            return self
        return self._replace(training=math.nextafter(times, 0.0) if times > 1.0 else 0.0)


@dataclass(frozen=True)
class KnownBatch:
    """Batch for which it is known how many times longer ones each plan has room for."""

    shapes: Shapes
    num_samples: int
    rooms: tuple[Room, ...]
    """Room by plan."""


@dataclass(frozen=True)
class KnownBatches:
    """Batches that are known, and plans by number: 0 is the usual one, and others have been made for longer batches."""

    batches: tuple[KnownBatch, ...]
    """Batches, at least one."""

    @property
    def num_plans(self) -> int:
        """Number of plans."""
        return len(self.batches[0].rooms)

    def plan_for(self, shapes: Shapes, *, evaluates: bool = False) -> int:
        """Number of the first plan that has room for a batch, as all plans after it have; `num_plans` if none has."""
        longer = [(times_longer(shapes, each.shapes), each.rooms) for each in self.batches]
        number = self.num_plans
        while number and any(times <= rooms[number - 1][evaluates] for times, rooms in longer):
            number -= 1
        return number

    def under(self, rooms: Sequence[Sequence[Room]]) -> KnownBatches:
        """Known batches with other rooms: one sequence for each batch, with one for each plan."""
        batches = tuple(replace(each, rooms=(*own,)) for each, own in zip(self.batches, rooms, strict=True))
        return KnownBatches(batches)


@dataclass(frozen=True)
class RunBatches:
    """Batches that have been run under a plan, by those that no other one is longer than."""

    longest: tuple[Shapes, ...] = ()

    def has_room(self, shapes: Shapes) -> bool:
        """True if a batch is nowhere longer than one that has been run."""
        return any(times_longer(shapes, each) == 1.0 for each in self.longest)

    def after(self, shapes: Shapes) -> RunBatches:
        """Batches with one more."""
        if self.has_room(shapes):
            return self
        return RunBatches((*(each for each in self.longest if times_longer(each, shapes) > 1.0), shapes))
