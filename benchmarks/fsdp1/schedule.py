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

from typing_extensions import override

from benchmarks.fsdp1.order import completed
from lightning_osdp.engine.host import Course, Host


class FSDP1Host(Host):
    """FSDP1's backward.

    Args:
        course: what there is to do.
        backward_prefetch: ``pre``, ``post`` or ``none``.
        forward_prefetch: FSDP1's option.
    """

    def __init__(self, course: Course, *, backward_prefetch: str, forward_prefetch: bool) -> None:
        units = course.units
        calls = [((unit.first, unit.last),) if course.merges_calls else unit.calls for unit in units]
        super().__init__(course, calls, backward_prefetch=backward_prefetch, forward_prefetch=forward_prefetch)
        self.root_gathers = any(units[root].gathered_bytes for root in self.root)
        begins = [spans[0][0] for spans in calls]
        self.complete = completed(units, begins, self.num_segments, is_ahead=forward_prefetch)

    @override
    def backward(self) -> None:
        if self.prefetch == "pre" and self.root_gathers:
            # The root's backward begins with the loss; without parameters it has nothing to prefetch from.
            self.gather_before(len(self.order))
        for segment in range(self.num_segments - 1, -1, -1):
            self.come_to(segment)
            self.note("backward", segment)
            for unit in self.complete[segment]:
                self.reduce(unit, prefetches=self.prefetch == "post")
            if segment == 0:
                for unit in self.root:
                    self.reduce(unit, prefetches=False)
            self.note("release", segment)

    @override
    def run_again(self, first: int, last: int, inside: frozenset[int]) -> None:
        for segment in range(first, last + 1):
            for unit in sorted(inside.intersection(self.starts[segment])):
                self.need(unit)
            self.note("rerun", segment)
            for unit in sorted(inside.intersection(self.ends[segment]), key=self.place.__getitem__):
                if not self.is_kept[unit] and unit not in self.reached:
                    self.free(unit)

    def reduce(self, unit: int, *, prefetches: bool) -> None:
        """Backward is through with it."""
        accumulates = self.accumulates[unit] and not self.is_last
        self.note("flatten", unit)
        if not (accumulates and self.is_kept[unit]):
            self.free(unit)
        if prefetches:
            self.gather_before(self.place[unit])
        self.note("accumulate" if accumulates else "reduce", unit)
