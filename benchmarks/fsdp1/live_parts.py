"""What is alive on one rank under FSDP1: the events of `schedule` read as bytes.

Notation: units u with P_u gathered bytes, S_u unsharded gradient bytes, s_u reduced gradient shard; i are segments
in forward order, the last of them the loss. Between optimizer steps lives

    base    = sum_u (parameters + optimizer state)_u / N  +  buffers  +  batch

and at segment i, with A_i the tensors saved for backward by segments up to i and w_i the workspace of segment i:

    fwd(i)  = base + sum_u s_u + [P of units gathered by i and not freed: DP, or i inside the unit] + A_i + w_i
    loss    = base + sum_u s_u + [P of DP units] + A + workspace of the loss
    bwd(i)  = base + [P still gathered, as above] + [P of the unit prefetched] + S so far + S_u + sum s_v + A_i
    rs(i)   = the same with P_u freed, what the reduce-scatter returns, and the copy that gloo makes of S_u
    opt     = base + sum_u s_u + temporaries of the optimizer

`fwd` carries the last step's reduced gradients because Lightning zeroes them between forward and backward. `bwd`
counts S_u twice at the unit's first operator: per-parameter gradients and their flat concatenation live together for
a moment. By then what the unit's backward had saved is gone, and the gradient that it hands on is there: `settled`
bytes in place of A_i. Under mixed precision a gather holds the shard in the dtype of computing besides, in forward
with what one segment hands on to the next, and the result of a reduce-scatter is cast to the dtype at rest. The root
unit is gathered throughout, and its gradients stay unsharded to the end of backward.

References:
    torch/distributed/fsdp/_runtime_utils.py (unshard, prefetch, reduce), _flat_param.py (padding, flat gradient).
"""

from __future__ import annotations

from typing_extensions import override

from lightning_osdp.core.profile import OperatorProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine.live_parts import LiveParts


class FSDP1LiveParts(LiveParts):
    """A unit is one tensor, and so are its gradients before they are reduced."""

    @override
    def _gather(self, unit: int) -> None:
        size = self.sizes[unit]
        self.whole.add(unit)
        self._add("gathered parameters", size.gathered)
        if size.cast_shard:
            self._observe_gather(unit, size.cast_shard)

    @override
    def _gather_in_node(self, unit: int) -> None:
        self._gather(unit)

    @override
    def _await(self, unit: int) -> None:
        """What was gathered is used as it is."""

    @override
    def _flatten(self, unit: int) -> None:
        """Per-parameter gradients and their flat concatenation live together."""
        size = self.sizes[unit]
        self._settle(unit)
        self._observe("backward", self._name(unit), "unsharded gradients", size.flat_gradient)
        self._add("unsharded gradients", size.flat_gradient - size.gradients)

    @override
    def _accumulate(self, unit: int) -> None:
        """The gradient is left whole, or is gone once it is added to the one that is there."""
        whole = self.sizes[unit].whole_gradient
        self._add("unsharded gradients", -whole)
        if unit not in self.accumulated:
            self.accumulated.add(unit)
            self._add("accumulated gradients", whole)
        self.settled = 0.0

    @override
    def _reduce(self, unit: int) -> None:
        """The gradient is reduced, cast to the dtype at rest where that is another, and its shard is kept.

        Where gradients were accumulated, it is their sum that is reduced; the last micro-batch's own one still lives.
        """
        size = self.sizes[unit]
        flat, name, is_sharded = size.flat_gradient, self._name(unit), self.world_size > 1
        is_cast = size.scattered != size.reduced
        if is_sharded:
            self._observe("reduce-scatter", name, "unsharded gradients", size.scattered + flat * self.copies)
        if is_cast:
            # on one rank the sum of micro-batches is cast down and up again
            beside = size.reduced + (size.scattered if is_sharded else flat * (self.num_micro_batches > 1))
            self._observe("backward", name, "unsharded gradients", beside)
        self._add("unsharded gradients", -flat)
        if unit in self.accumulated:
            self.accumulated.remove(unit)
            self._add("accumulated gradients", -flat)
        if unit not in self.reduced:
            self.reduced.add(unit)
            self._add("reduced gradients", size.reduced)
        self.settled = 0.0

    @override
    def _reduce_in_node(self, unit: int) -> None:
        """What is all-reduced then is the shard that is kept."""
        self._reduce(unit)

    @override
    def _adds_in_place(self, unit: int) -> bool:
        return False

    @override
    def _gradient_bytes(self, unit: UnitProfile, operator: OperatorProfile) -> int:
        """In a unit that is not all frozen, frozen parameters have gradients, too: the flat parameter requires one."""
        return operator.gradient_bytes + (operator.frozen_bytes if unit.gradient_bytes else 0)
