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
- Under hybrid strategies all of this is among the ranks of a node, and each rank's part of a reduced gradient is
  all-reduced between nodes at once.

References:
    torch/distributed/fsdp/_runtime_utils.py (``_pre_forward_unshard``, ``_post_forward_reshard``,
    ``_pre_backward_hook``, ``_post_backward_hook``, ``_prefetch_handle``), _exec_order_utils.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine.schedule import Host, gathered_ahead, leaving_order


class FSDP1Host(Host):
    """FSDP1's backward, and lists of units to prefetch that leave out none."""

    @override
    def __post_init__(self) -> None:
        if self.merges_calls:
            self.units = [replace(unit, calls=((unit.first, unit.last),)) for unit in self.units]
            self.merges_calls = False
        super().__post_init__()
        self.comes_back = set(self.order)
        if self.forward_prefetch:
            self.ahead = gathered_ahead(self.units, self.num_segments)
        self.complete = completed(self.units, self.num_segments, is_ahead=self.forward_prefetch)

    @override
    def backward(self) -> None:
        if self.backward_prefetch == "pre" and any(self.units[root].gathered_bytes for root in self.root):
            # The root's backward begins with the loss; without parameters it has nothing to prefetch from.
            self.gather_before(len(self.order))
        for segment in range(self.num_segments - 1, -1, -1):
            self.come_to(segment)
            self.note("backward", segment)
            for unit in self.complete[segment]:
                self.reduce(unit, prefetches=self.backward_prefetch == "post")
            if segment == 0:
                for unit in self.root:
                    self.reduce(unit)
            self.note("release", segment)

    @override
    def reach(self, unit: int, num_calls: int) -> None:
        self.reached.add(unit)
        self.need(unit)
        if self.backward_prefetch == "pre":
            self.gather_before(self.place[unit])

    @override
    def run_again(self, first: int, last: int, inside: frozenset[int]) -> None:
        for segment in range(first, last + 1):
            for unit in sorted(inside.intersection(self.starts[segment])):
                self.need(unit)
            self.note("rerun", segment)
            for unit in sorted(inside.intersection(self.ends[segment]), key=self.place.__getitem__):
                if not self.is_kept[unit] and unit not in self.reached:
                    self.free(unit)

    @override
    def reduce(self, unit: int, *, prefetches: bool = False) -> None:
        accumulates = self.accumulates[unit] and not self.is_last
        self.note("flatten", unit)
        self.leave(unit)
        if prefetches:
            self.gather_before(self.place[unit])
        if not accumulates and unit in self.in_node:
            self.note("reduce_in_node", unit)
            self.note("all_reduce", unit)
        else:
            self.note("accumulate" if accumulates else "reduce", unit)


def completed(units: Sequence[UnitProfile], num_segments: int, *, is_ahead: bool) -> list[list[int]]:
    """For each segment, the units with whose gradients backward is through when it is over, in order; without the root.

    That is the segment in which a unit begins. But where forward gathers ahead, it splits the unit's parameters into
    views before the unit before it runs, and autograd takes what forward did last first: then it is the segment in
    which that one begins. A frozen unit has no gradient to wait for.

    Args:
        units: root first, if any, then in forward order.
        num_segments: of the model.
        is_ahead: FSDP1's ``forward_prefetch``.
    """
    found: list[list[int]] = [[] for _ in range(num_segments)]
    in_turn = [index for index, unit in enumerate(units) if unit.gathered_bytes or not unit.is_root]
    for before, index in zip([*in_turn[:1], *in_turn], in_turn, strict=False):
        if not units[index].is_root:
            waits = is_ahead and units[index].gradient_bytes
            found[units[before if waits else index].first].append(index)
    if is_ahead:
        return [through[::-1] for through in found]
    place = {unit: place for place, unit in enumerate(leaving_order(units))}
    return [sorted(through, key=place.__getitem__) for through in found]
