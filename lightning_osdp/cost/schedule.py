"""What FSDP1 does in one optimizer step, in the order in which the host issues it: the one account of its rules.

Memory (`live_parts`) and time (`simulation`) are two readings of the same events.

- Forward gathers a unit at each call of its module and frees it after, unless its mode keeps it. The root is gathered
  first and never freed in forward.
- Backward gathers what was freed when it reaches a unit's output, and frees it and reduces its gradients once it is
  through with the unit's first call. The root comes last.
- ``BACKWARD_PRE`` ("pre") gathers the next unit before a unit's backward runs, ``BACKWARD_POST`` ("post") after it and
  before its gradients are reduced; "next" is the one that forward left before. ``forward_prefetch`` gathers the next
  unit of forward before a unit's first call runs, which lets backward be through with it one unit later.
- A block that recomputes runs its forward again when backward reaches it. Units inside it are gathered for that as in
  forward, and freed after, but for those that backward has reached by then: the block's own unit, and the last one
  inside, unless the block saves something after it.
- A unit that accumulates is in ``no_sync`` until the last micro-batch: its gradients stay whole and are not reduced,
  and where its mode keeps it gathered it stays so to the end of the last backward.

References:
    torch/distributed/fsdp/_runtime_utils.py (``_pre_forward_unshard``, ``_post_forward_reshard``,
    ``_pre_backward_hook``, ``_post_backward_hook``, ``_prefetch_handle``), _exec_order_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import ModelProfile, Rerun, Span
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost.order import completed, gathered_ahead, leaving_order

Kind = Literal[
    "gather", "await", "forward", "free", "zero", "rerun", "backward", "flatten", "accumulate", "reduce", "release"
]
"""``await``: what follows needs the gathered unit. ``zero``: Lightning drops the gradients of the step before, between
the first forward and its backward. ``rerun``: forward again, in backward; what it takes is part of the block's last
``backward``. ``flatten``: a unit's gradients are made one tensor, before the unit is freed.
``accumulate``: they are left whole for the next micro-batch. ``release``: what a segment had saved is gone."""

MOST_SIMULATED = 3
"""Micro-batches that are gone through one by one: first, steady, last. Further ones are like the steady one."""


class Event(NamedTuple):
    """One thing that the host has done."""

    kind: Kind
    of: int
    """The segment that is run (``forward``, ``rerun``, ``backward``, ``release``), else the unit."""


def events_of(
    profile: ModelProfile,
    units: Sequence[UnitProfile],
    modes: Sequence[ShardingMode],
    world_size: int,
    *,
    num_micro_batches: int = 1,
    backward_prefetch: str,
    forward_prefetch: bool,
) -> list[list[Event]]:
    """Events of the micro-batches that are gone through; on one rank no mode keeps anything."""
    return micro_batches(
        units,
        [unit.calls for unit in units],
        [mode.resident and world_size > 1 for mode in modes],
        [mode.sync == "last" and world_size > 1 for mode in modes],
        num_micro_batches=num_micro_batches,
        num_segments=len(profile.segments),
        rerun=profile.rerun,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
    )


def micro_batches(
    units: Sequence[UnitProfile],
    calls: Sequence[Sequence[Span]],
    is_kept: Sequence[bool],
    accumulates: Sequence[bool],
    *,
    num_micro_batches: int = 1,
    num_segments: int,
    rerun: Mapping[str, Rerun],
    backward_prefetch: str,
    forward_prefetch: bool,
) -> list[list[Event]]:
    """Events of forward, loss and backward in the first, a steady and the last micro-batch, as many as there are.

    Args:
        units: root first, if any, then in forward order.
        calls: of each unit.
        is_kept: whether a unit stays gathered from its first call in forward to the end of its backward.
        accumulates: whether only the last micro-batch reduces a unit's gradients.
        num_micro_batches: of an optimizer step.
        num_segments: of the model, the loss included.
        rerun: blocks that recompute.
        backward_prefetch: ``pre``, ``post`` or ``none``.
        forward_prefetch: FSDP1's option.
    """
    host = _Host(units, calls, is_kept, accumulates, num_segments=num_segments, rerun=rerun, is_ahead=forward_prefetch)
    found = []
    num_simulated = min(MOST_SIMULATED, num_micro_batches)
    for index in range(num_simulated):
        host.begin(is_first=index == 0, is_last=index == num_simulated - 1)
        host.forward()
        host.backward(prefetch=backward_prefetch)
        found.append(host.events)
    return found


class _Host:
    """The host's state: which units it has gathered."""

    def __init__(
        self,
        units: Sequence[UnitProfile],
        calls: Sequence[Sequence[Span]],
        is_kept: Sequence[bool],
        accumulates: Sequence[bool],
        *,
        num_segments: int,
        rerun: Mapping[str, Rerun],
        is_ahead: bool,
    ) -> None:
        self.is_kept, self.accumulates, self.num_segments = is_kept, accumulates, num_segments
        self.order = leaving_order(units)
        self.place = {unit: place for place, unit in enumerate(self.order)}
        self.root = [index for index, unit in enumerate(units) if unit.is_root]
        self.root_gathers = any(units[root].gathered_bytes for root in self.root)
        self.starts: list[list[int]] = [[] for _ in range(num_segments)]
        self.ends: list[list[int]] = [[] for _ in range(num_segments)]
        for unit in self.order:
            for first, last in calls[unit]:
                self.starts[first].append(unit)
                self.ends[last].append(unit)
        begins = [spans[0][0] for spans in calls]
        self.ahead = gathered_ahead(units, begins, num_segments) if is_ahead else [[] for _ in range(num_segments)]
        self.complete = completed(units, begins, num_segments, is_ahead=is_ahead)
        self.rerun = {
            last: (first, _inside(units, block), is_early) for block, ((first, last), is_early) in rerun.items()
        }
        """Last segment of a block that recomputes -> its first one, the units inside it, and whether it is early."""
        self.gathered: set[int] = set()
        self.begin(is_first=True, is_last=True)

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """A micro-batch."""
        self.is_first, self.is_last = is_first, is_last
        self.events: list[Event] = []
        self.reached: set[int] = set()  # by backward: FSDP prefetches none of them again

    def note(self, kind: Kind, of: int) -> None:
        self.events.append(Event(kind, of))

    def gather(self, unit: int) -> None:
        if unit not in self.gathered:
            self.gathered.add(unit)
            self.note("gather", unit)

    def need(self, unit: int) -> None:
        self.gather(unit)
        self.note("await", unit)

    def free(self, unit: int) -> None:
        self.gathered.discard(unit)
        self.note("free", unit)

    def forward(self) -> None:
        for unit in self.root:
            self.need(unit)
        for segment in range(self.num_segments):
            called: set[int] = set()  # a module may be called twice in one segment
            for unit in sorted(self.starts[segment]):
                if unit in called and not self.is_kept[unit]:
                    self.free(unit)
                called.add(unit)
                self.need(unit)
            for unit in self.ahead[segment]:
                self.gather(unit)
            self.note("forward", segment)
            for unit in sorted(set(self.ends[segment]), key=self.place.__getitem__):
                if not self.is_kept[unit]:
                    self.free(unit)
        if self.is_first:
            self.note("zero", 0)

    def gather_before(self, place: int) -> None:
        """The prefetch of backward."""
        if place > 0 and self.order[place - 1] not in self.reached:
            self.gather(self.order[place - 1])

    def backward(self, *, prefetch: str) -> None:
        is_pre, is_post = prefetch == "pre", prefetch == "post"
        if is_pre and self.root_gathers:
            # The root's backward begins with the loss; without parameters it has nothing to prefetch from.
            self.gather_before(len(self.order))
        for segment in range(self.num_segments - 1, -1, -1):
            first, inside, is_early = self.rerun.get(segment, (segment + 1, frozenset(), False))
            ends = sorted(set(self.ends[segment]), key=self.place.__getitem__, reverse=True)
            late = inside.intersection(ends) if is_early else ()
            self.reach((unit for unit in ends if unit not in late), prefetches=is_pre)
            self.run_again(first, segment, inside)
            self.reach((unit for unit in ends if unit in late), prefetches=is_pre)
            self.note("backward", segment)
            for unit in self.complete[segment]:
                self.reduce(unit, prefetches=is_post)
            if segment == 0:
                for unit in self.root:
                    self.reduce(unit, prefetches=False)
            self.note("release", segment)

    def reach(self, units: Iterable[int], *, prefetches: bool) -> None:
        """Backward comes to what these units have returned."""
        for unit in units:
            self.reached.add(unit)
            self.need(unit)
            if prefetches:
                self.gather_before(self.place[unit])

    def run_again(self, first: int, last: int, inside: frozenset[int]) -> None:
        """Forward of a block that recomputes, if one ends with this segment."""
        for segment in range(first, last + 1):
            for unit in sorted(inside.intersection(self.starts[segment])):
                self.need(unit)
            self.note("rerun", segment)
            for unit in sorted(inside.intersection(self.ends[segment]), key=self.place.__getitem__):
                if not self.is_kept[unit] and unit not in self.reached:
                    self.free(unit)

    def reduce(self, unit: int, *, prefetches: bool) -> None:
        accumulates = self.accumulates[unit] and not self.is_last
        self.note("flatten", unit)
        if not (accumulates and self.is_kept[unit]):
            self.free(unit)
        if prefetches:
            self.gather_before(self.place[unit])
        self.note("accumulate" if accumulates else "reduce", unit)


def _inside(units: Sequence[UnitProfile], block: str) -> frozenset[int]:
    return frozenset(index for index, unit in enumerate(units) if unit.name.startswith(f"{block}."))
