"""The host as it goes through a step: which units it has gathered, and the events so far.

What all engines do alike is here: forward gathers a unit at each call of its module and frees it after, unless it is
kept; the root is gathered first and never freed in forward; a block that recomputes runs its forward again when
backward reaches it. Backward itself is the engine's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_osdp.core.profile import Rerun, Span
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine.events import Event, Kind
from lightning_osdp.engine.order import gathered_ahead, leaving_order


@dataclass(frozen=True, kw_only=True)
class Course:
    """What forward comes to, and how each unit is treated."""

    units: Sequence[UnitProfile]
    """Root first, if any, then in forward order."""
    is_kept: Sequence[bool]
    """Whether a unit stays gathered from its first call in forward to the end of its backward."""
    accumulates: Sequence[bool]
    """Whether only the last micro-batch reduces a unit's gradients."""
    num_segments: int
    """Of the model, the loss included."""
    rerun: Mapping[str, Rerun]
    """Blocks that recompute."""
    merges_calls: bool = False
    """Whether a unit that forward calls again is taken as gathered from its first call to its last."""


class Host(ABC):
    """The state, for one micro-batch after the other.

    Args:
        course: what there is to do.
        calls: of each unit.
        backward_prefetch: ``pre``, ``post`` or ``none``.
        forward_prefetch: whether the next unit of forward is gathered before one runs.
    """

    def __init__(
        self,
        course: Course,
        calls: Sequence[Sequence[Span]],
        *,
        backward_prefetch: str,
        forward_prefetch: bool,
    ) -> None:
        units, self.num_segments = course.units, course.num_segments
        self.is_kept, self.accumulates = course.is_kept, course.accumulates
        self.prefetch = backward_prefetch
        self.order = leaving_order(units)
        self.place = {unit: place for place, unit in enumerate(self.order)}
        self.root = [index for index, unit in enumerate(units) if unit.is_root]
        self.starts: list[list[int]] = [[] for _ in range(self.num_segments)]
        self.ends: list[list[int]] = [[] for _ in range(self.num_segments)]
        for unit in self.order:
            for first, last in calls[unit]:
                self.starts[first].append(unit)
                self.ends[last].append(unit)
        self.leaves = self.ends
        """Units that forward is through with, by segment."""
        self.ahead: list[list[int]] = [[] for _ in range(self.num_segments)]
        if forward_prefetch:
            self.ahead = gathered_ahead(units, [spans[0][0] for spans in calls], self.num_segments)
        self.rerun = {
            last: (first, _inside(units, block), is_early) for block, ((first, last), is_early) in course.rerun.items()
        }
        """Last segment of a block that recomputes -> its first one, the units inside it, and whether it is early."""
        self.gathered: set[int] = set()
        self.begin(is_first=True, is_last=True)

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """A micro-batch."""
        self.is_first, self.is_last = is_first, is_last
        self.events: list[Event] = []
        self.called: set[int] = set()  # by forward
        self.reached: set[int] = set()  # by backward: none of them is prefetched again

    @abstractmethod
    def backward(self) -> None:
        """All of it."""

    def note(self, kind: Kind, of: int) -> None:
        """One more event."""
        self.events.append(Event(kind, of))

    def gather(self, unit: int) -> None:
        """Unless it is there."""
        if unit not in self.gathered:
            self.gathered.add(unit)
            self.note("gather", unit)

    def need(self, unit: int) -> None:
        """What follows computes with it."""
        self.gather(unit)
        self.note("await", unit)

    def free(self, unit: int) -> None:
        """Its shard alone is left."""
        self.gathered.discard(unit)
        self.note("free", unit)

    def forward(self) -> None:
        """All of it, the loss included."""
        for unit in self.root:
            self.need(unit)
        for segment in range(self.num_segments):
            for unit in sorted(self.starts[segment]):
                if unit in self.called and unit in self.gathered and not self.is_kept[unit]:
                    self.free(unit)  # a module may be called twice in one segment
                self.called.add(unit)
                self.need(unit)
            for unit in self.ahead[segment]:
                self.gather(unit)
            self.note("forward", segment)
            for unit in sorted(set(self.leaves[segment]), key=self.place.__getitem__):
                if not self.is_kept[unit]:
                    self.free(unit)
        if self.is_first:
            self.note("zero", 0)

    def gather_before(self, place: int) -> None:
        """The prefetch of backward."""
        if place > 0 and self.order[place - 1] not in self.reached:
            self.gather(self.order[place - 1])

    def come_to(self, segment: int) -> None:
        """Backward comes to what this segment has made: to the units that end with it, and to what is run again."""
        first, inside, is_early = self.rerun.get(segment, (segment + 1, frozenset(), False))
        ends = sorted(set(self.ends[segment]), key=self.place.__getitem__, reverse=True)
        late = inside.intersection(ends) if is_early else ()
        self.reach(unit for unit in ends if unit not in late)
        self.run_again(first, segment, inside)
        self.reach(unit for unit in ends if unit in late)

    def reach(self, units: Iterable[int]) -> None:
        """Backward comes to what these units have returned."""
        for unit in units:
            self.reached.add(unit)
            self.need(unit)
            if self.prefetch == "pre":
                self.gather_before(self.place[unit])

    @abstractmethod
    def run_again(self, first: int, last: int, inside: frozenset[int]) -> None:
        """Forward of a block that recomputes, if one ends with this segment.

        Args:
            first: its first segment; behind the last one where there is none.
            last: the segment.
            inside: the units inside.
        """


def _inside(units: Sequence[UnitProfile], block: str) -> frozenset[int]:
    return frozenset(index for index, unit in enumerate(units) if unit.name.startswith(f"{block}."))
