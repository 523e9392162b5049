"""What FSDP2 does in one optimizer step, in the order in which the host issues it: the one account of its rules.

With explicit lists of modules to prefetch, one for each unit:

- Forward gathers a unit at each call of its module and frees it after, unless its mode keeps it. The root is gathered
  first and kept to the end of backward. ``forward_prefetch`` gathers the next unit right after a unit is copied out.
- Backward gathers a unit when it reaches what a call of it has returned, and frees it when the gradients of that call's
  inputs are there: so a unit that forward calls twice is gathered twice in backward, kept or not. Its gradients are
  reduced at the first call, autograd holds them until then.
- Prefetching ("pre") gathers the unit that forward left before, once backward has come to a unit, whatever it needs;
  but none that backward does not come to, as everything in it and before it is frozen.
- Where the inputs of a unit's first call need no gradient, nothing tells that backward is through with it: it is freed
  and reduced at the end of backward, after the root, in the order of ``named_modules()`` (here: of forward). So are
  units that backward does not come to.
- A block that recomputes runs its forward again when backward reaches it. Units inside it are gathered for that, and
  stay gathered until backward is through with them.
- A unit that accumulates does not reduce its gradients until the last micro-batch; where its mode keeps it gathered, it
  stays so to the end of the last backward.

A list may prefetch what is not needed any more, where forward calls a unit again; it is taken that none does.

References:
    torch/distributed/fsdp/_fully_shard/_fsdp_state.py (``_pre_forward``, ``_pre_backward``,
    ``_root_post_backward_final_callback``), _fsdp_param_group.py (``unshard``, ``post_backward``). [Read, and seen in
    torch 2.13 on two to four gloo ranks.]
"""

from __future__ import annotations

from lightning_osdp.engine.host import Course, Host


class FSDP2Host(Host):
    """FSDP2's backward.

    Args:
        course: what there is to do.
        backward_prefetch: ``pre`` or ``none``.
        forward_prefetch: whether the next unit of forward is gathered before one runs.
    """

    def __init__(self, course: Course, *, backward_prefetch: str, forward_prefetch: bool) -> None:
        calls = [unit.calls for unit in course.units]
        super().__init__(course, calls, backward_prefetch=backward_prefetch, forward_prefetch=forward_prefetch)
        self.trained_from = course.units[0].trained_from if course.units else 0
        self.merges_calls = course.merges_calls
        if course.merges_calls:
            self.leaves = [[unit for unit in ends if calls[unit][-1][1] == i] for i, ends in enumerate(self.ends)]
        self.returns: list[list[tuple[int, bool]]] = [[] for _ in range(self.num_segments)]
        """By segment, units with whose call backward is through then, and whether it is the last that it comes to."""
        self.at_the_end: list[int] = []
        """Units that are freed and reduced at the end of backward."""
        for unit in sorted(self.order, key=self.place.__getitem__):
            reached = [first for first, last in calls[unit] if last >= self.trained_from]
            if not reached or reached[0] <= self.trained_from:
                self.at_the_end.append(unit)
                reached = reached[1:]
                last_is_in_turn = False
            else:
                last_is_in_turn = True
            for index, first in enumerate(reached):
                self.returns[first].append((unit, index == 0 and last_is_in_turn))
        self.at_the_end.sort()

    def backward(self) -> None:
        """All of it."""
