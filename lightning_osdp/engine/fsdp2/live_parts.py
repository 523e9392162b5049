"""What is alive on one rank under ``fully_shard``: the events of `schedule` read as bytes.

Of one unit: w unsharded, s its shard, g its gradients, l that of its last parameter, r what a reduce-scatter takes, A
what is saved, h the gradient that it hands on. Of L equal units, of which backward has reduced those after the i-th,
beside the states between steps:

    forward     (L-1) k + 3 w + A                                            k = w where units are kept, else 0
    copy-out    (L-1-i) s + i k + q + 2 w + h + A_i                          q = r of the unit reduced before
    compute     (L-1-i) s + i k + q + w + p + g + A_i                        p = w of the unit prefetched
    reduce      (L-1-i) s + i k + p + r + l + r/N + max(cast s, gloo r) + A_i

- An all-gather fills one buffer, from which each parameter is copied. In forward the buffer of a unit lives until the
  next unit has been copied out, so that two of them live beside the copy; unless unsharding is asynchronous: then, and
  in backward, it is gone after the copy. Where forward is run again in backward, it is gone when the unit's has run.
- Under mixed precision the shard is cast for an all-gather, and what a reduce-scatter returns is cast to the dtype at
  rest.
- Gradients are copied into one tensor to be reduced. It lives until backward is through with the next unit, or is over.
  The last gradient lives while the tensor is reduced, a name outlives the loop.
- On one rank there are no buffers, but shards are copied all the same.
- Gradients that are not reduced are left as backward makes them, and added to in place; or cast to the dtype of
  reducing, where that is another, and those of the next micro-batch are added when a unit has all of them.

References:
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (``wait_for_unshard``, ``post_backward``),
    _fsdp_collectives.py (``foreach_reduce``). [Within 0.1% of a count of live storages for equal units, in torch 2.13.]
"""

from __future__ import annotations

from typing_extensions import override

from lightning_osdp.core.profile import OperatorProfile
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine.layout import Layout
from lightning_osdp.engine.live_parts import LiveParts, Observer


class FSDP2LiveParts(LiveParts):
    """Parameters and gradients are tensors of their own, and are copied to and from what collectives use.

    Args:
        step: whose events are read.
        observer: told of every moment.
        layout: of its units on the rank in question.
        asynchronous_unshard: whether unsharding is asynchronous.
        is_bound: whether what is left of one unit while another runs is to be the most that other modes would leave.
    """

    def __init__(
        self, step: Step, observer: Observer, *, layout: Layout, asynchronous_unshard: bool, is_bound: bool
    ) -> None:
        super().__init__(step, observer, layout=layout)
        self.is_synchronous, self.is_bound = not asynchronous_unshard, is_bound
        self.pending: set[int] = set()  # units whose buffer is not copied out yet
        self.copied: int | None = None  # the unit that was awaited last, if it was copied out then
        self.whole: set[int] = set()  # units that are copied out
        self.lingering = 0.0  # the buffer that forward has copied out last
        self.sent = 0.0  # what the latest reduce-scatter took
        self.is_over = False  # backward, but for what is left to reduce
        self.received = 0.0  # bytes beyond the saved tensors where backward comes from one segment to the one before

    @override
    def begin_micro_batch(self) -> None:
        super().begin_micro_batch()
        self._send(0.0)
        self.is_over, self.received = False, 0.0

    @override
    def _gather(self, unit: int) -> None:
        size = self.sizes[unit]
        if self.is_bound and self.world_size == 1:
            # a prefetched unit has no buffer, which elsewhere is as large as what a mode would keep of it
            self._copy_out(unit, size.cast_shard)
            return
        self.pending.add(unit)
        self._add("gathered parameters", size.buffer)
        if size.cast_shard and self.world_size > 1:
            self._observe_gather(unit, size.cast_shard)

    @override
    def _await(self, unit: int) -> None:
        self.copied = unit if unit in self.pending else None
        if self.copied is None:
            return
        self.pending.remove(unit)
        size = self.sizes[unit]
        self._copy_out(unit, 0.0 if self.world_size > 1 else size.cast_shard)
        self._add("gathered parameters", -size.buffer)
        if not self.is_in_backward:
            self._linger(unit)

    @override
    def _linger(self, unit: int) -> None:
        if self.is_synchronous and unit == self.copied:
            # units that are kept from an earlier micro-batch, or to be called again, leave an earlier buffer for longer
            buffer = self.sizes[unit].buffer
            self._leave(max(self.lingering, buffer) if self.is_bound else buffer)

    def _copy_out(self, unit: int, beside: float) -> None:
        self.whole.add(unit)
        self._add("gathered parameters", self.sizes[unit].gathered)
        self._observe_gather(unit, beside + self.received)

    @override
    def _free(self, unit: int) -> None:
        """At the end of backward that may be one that is not there."""
        if unit in self.whole:
            self.whole.remove(unit)
            super()._free(unit)

    @override
    def _forward(self, index: int) -> None:
        super()._forward(index)
        if self.is_in_backward:
            self._leave(0.0)

    @override
    def _rerun(self, index: int) -> None:
        super()._rerun(index)
        if self.copied is not None and any(last == index for _, last in self.units[self.copied].calls):
            self._leave(0.0)

    @override
    def _backward(self, index: int) -> None:
        self.received = 0.0
        super()._backward(index)

    @override
    def _release(self, index: int) -> None:
        super()._release(index)
        self.is_over = index == 0
        passed = self.profile.segments[index].passed_bytes
        # the gradient that it hands on: its own saved tensors are gone
        self.received = 0.0 if passed is None else passed.at(self.samples) - self.parts["activations"]

    @override
    def _flatten(self, unit: int) -> None:
        if not self.is_over:
            self._settle(unit)
        if unit in self.accumulated and not self._adds_in_place(unit):
            self._add("unsharded gradients", -self.sizes[unit].gradients)

    @override
    def _accumulate(self, unit: int) -> None:
        size = self.sizes[unit]
        if unit not in self.accumulated:
            if size.casting:
                self._observe("backward", self._name(unit), "accumulated gradients", size.casting)
            self.accumulated.add(unit)
            self._add("unsharded gradients", -size.gradients)
            self._add("accumulated gradients", size.whole_gradient)
        self.settled = 0.0

    @override
    def _reduce(self, unit: int) -> None:
        size, name, before = self.sizes[unit], self._name(unit), self.sent
        self._send(0.0)
        last = size.last_whole_gradient if unit in self.accumulated else size.last_gradient
        sent, left = size.flat_gradient, size.flat_gradient + last + size.scattered
        if sent:
            self._observe("backward", name, "unsharded gradients", sent)
        if unit in self.accumulated:
            self.accumulated.remove(unit)
            self._add("accumulated gradients", -size.whole_gradient)
        else:
            self._add("unsharded gradients", -size.gradients)
        if sent and self.world_size > 1:
            self._observe("reduce-scatter", name, "unsharded gradients", left + sent * self.copies)
        if sent:
            is_cast = size.scattered != size.reduced
            self._observe("backward", name, "unsharded gradients", left + size.reduced * is_cast)
        if unit not in self.reduced:
            self.reduced.add(unit)
            self._add("reduced gradients", size.reduced)
        # where others reduce in the last micro-batch only, an earlier one is there for longer
        self._send(max(before, sent) if self.is_bound and self.num_micro_batches > 1 else sent)
        self.settled = 0.0

    @override
    def _adds_in_place(self, unit: int) -> bool:
        return unit in self.accumulated and not self.sizes[unit].casting

    @override
    def _gradient_bytes(self, unit: UnitProfile, operator: OperatorProfile) -> int:
        return operator.gradient_bytes

    def _leave(self, num_bytes: float) -> None:
        self._add("gathered parameters", num_bytes - self.lingering)
        self.lingering = num_bytes

    def _send(self, num_bytes: float) -> None:
        self._add("unsharded gradients", num_bytes - self.sent)
        self.sent = num_bytes
