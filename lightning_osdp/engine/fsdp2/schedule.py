"""What ``fully_shard`` does in one optimizer step, in the order in which the host issues it.

With explicit lists of modules to prefetch, one for each unit:

- Forward gathers a unit at each call of its module and frees it after, unless its mode keeps it. The root is gathered
  first and kept to the end of backward. ``forward_prefetch`` gathers the next unit once a unit is copied out.
- Backward gathers a unit when it reaches what a call of it has returned, and frees it when the gradients of that call's
  inputs are there: a unit that forward calls twice is gathered twice in backward, unless it is kept and this is the
  first time. Its gradients are reduced at its first call; autograd holds them until then.
- Prefetching ("pre") gathers the unit that forward left before, once backward has come to a unit; but none that
  backward does not come to, as everything up to it is frozen.
- Both are lists, and leave out units that are to be gathered late: only when their own turn comes.
- Where the inputs of a unit's first call need no gradient, nothing tells that backward is through with it: it is freed
  and reduced at the end of backward, after the root, in the order of ``named_modules()`` (here: of forward). So are
  units that backward does not come to.
- A block that recomputes runs its forward again when backward reaches it. Units inside it are gathered for that, and
  stay gathered until backward is through with them.
- A unit that accumulates does not reduce its gradients until the last micro-batch; where its mode keeps it gathered, it
  stays so to the end of the last backward. It must be called once (`Engine.may_wait`).

Lists hold at every call, so two kinds of unit must not have them, or they would gather what nobody needs any more: one
that forward calls more than once has none; and in forward one inside of a block that recomputes has none that leads out
of the block.

References:
    torch/distributed/fsdp/_fully_shard/_fsdp_state.py (``_pre_forward``, ``_pre_backward``,
    ``_root_post_backward_final_callback``), _fsdp_param_group.py (``unshard``, ``post_backward``). [Read, and seen in
    torch 2.13 on two to four gloo ranks.]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from typing_extensions import override

from lightning_osdp.engine.host import Course, Host


class FSDP2Host(Host):
    """Backward of ``fully_shard``.

    Args:
        course: what there is to do.
        backward_prefetch: ``pre`` or ``none``.
        forward_prefetch: whether the next unit of forward is gathered before one runs.
        late_forward: units that forward does not gather ahead, by name.
        late_backward: the same of backward.
    """

    def __init__(
        self,
        course: Course,
        *,
        backward_prefetch: str,
        forward_prefetch: bool,
        late_forward: Collection[str] = (),
        late_backward: Collection[str] = (),
    ) -> None:
        calls = [unit.calls for unit in course.units]
        super().__init__(course, calls, backward_prefetch=backward_prefetch, forward_prefetch=forward_prefetch)
        self.is_called_once = [len(spans) == 1 for spans in calls]
        self.trained_from = course.units[0].trained_from
        self.merges_calls = course.merges_calls
        if course.merges_calls:
            self.leaves = [[unit for unit in ends if calls[unit][-1][1] == i] for i, ends in enumerate(self.ends)]
        for segment, starting in enumerate(self.starts):
            is_late = any(course.units[unit].name in late_forward for unit in self.ahead[segment])
            if self.ahead[segment] and (is_late or not self._leads_on(segment, starting)):
                self.ahead[segment] = []
        self.late = {unit for unit in self.order if course.units[unit].name in late_backward}
        self.returns: list[list[tuple[int, bool]]] = [[] for _ in range(self.num_segments)]
        """By segment, the units with a call of which backward is through then, and whether that is their last one."""
        self.at_the_end: list[int] = []
        """Units that are freed and reduced at the end of backward, in order."""
        self.comes_back: set[int] = set()
        """Units that backward comes to."""
        for unit in self.order:
            # calls in one segment have no backward between them
            reached = [first for first, last in dict.fromkeys(calls[unit]) if last >= self.trained_from]
            if reached:
                self.comes_back.add(unit)
            if not reached or reached[0] <= self.trained_from:
                self.at_the_end.append(unit)
            else:
                self.returns[reached[0]].append((unit, True))
            for first in reached[1:]:
                self.returns[first].append((unit, False))
        self.at_the_end.sort()

    def _leads_on(self, segment: int, starting: Sequence[int]) -> bool:
        """Whether what begins with this segment, or else the root, prefetches in forward."""
        if not starting:
            return segment == 0
        (following,), innermost = self.ahead[segment], max(starting)
        around = (inside for _, inside, _ in self.rerun.values() if innermost in inside)
        return self.is_called_once[innermost] and all(following in inside for inside in around)

    @override
    def backward(self) -> None:
        if self.prefetch == "pre":
            self.gather_before(len(self.order))
        for segment in range(self.num_segments - 1, -1, -1):
            if segment >= self.trained_from:
                self.come_to(segment)
            self.note("backward", segment)
            for unit, is_through in self.returns[segment]:
                if is_through:
                    self.reduce(unit)
                elif not self.merges_calls:
                    self.leave(unit)
            self.note("release", segment)
        for unit in (*self.root, *self.at_the_end):
            self.reduce(unit)

    @override
    def gather_before(self, place: int) -> None:
        if place > 0 and self.order[place - 1] in self.comes_back and self.order[place - 1] not in self.late:
            super().gather_before(place)

    @override
    def come_to(self, segment: int) -> None:
        self.calls_here = Counter(self.ends[segment])
        super().come_to(segment)

    @override
    def reach(self, units: Iterable[int]) -> None:
        for unit in units:
            if self.merges_calls and unit in self.reached:
                self.free(unit)  # and gathered again: what that takes is seen, though it has been there meanwhile
            self.reached.add(unit)
            self.need(unit)
            if self.prefetch == "pre" and self.is_called_once[unit]:
                self.gather_before(self.place[unit])
            for _ in range(self.calls_here[unit] - 1):
                self.leave(unit)
                self.need(unit)

    @override
    def run_again(self, first: int, last: int, inside: frozenset[int]) -> None:
        for segment in range(first, last + 1):
            for unit in sorted(inside.intersection(self.starts[segment])):
                self.need(unit)
                self.note("linger", unit)
            for unit in inside.intersection(self.ahead[segment]):
                self.gather(unit)
            self.note("rerun", segment)

    def leave(self, unit: int) -> None:
        """Backward is through with a call of it."""
        if not (self.accumulates[unit] and self.is_kept[unit] and not self.is_last):
            self.free(unit)

    def reduce(self, unit: int) -> None:
        """Backward is through with it."""
        self.note("flatten", unit)
        self.leave(unit)
        self.note("accumulate" if self.accumulates[unit] and not self.is_last else "reduce", unit)
