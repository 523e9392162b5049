"""What is alive on one rank under FSDP1: the events of `schedule` read as bytes.

The formulas that come of it are in `cost.moments`.
"""

from __future__ import annotations

from lightning_osdp.core.profile import OperatorProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine.live_parts import LiveParts


class FSDP1LiveParts(LiveParts):
    """A unit is one tensor, and so are its gradients before they are reduced."""

    def _gather(self, unit: int) -> None:
        size = self.sizes[unit]
        self._add("gathered parameters", size.gathered)
        if size.cast_shard:
            self._observe_gather(unit, size.cast_shard)

    def _await(self, unit: int) -> None:
        """What was gathered is used as it is."""

    def _flatten(self, unit: int) -> None:
        """Per-parameter gradients and their flat concatenation live together."""
        size = self.sizes[unit]
        self._settle(unit)
        self._observe("backward", self._name(unit), "unsharded gradients", size.flat_gradient)
        self._add("unsharded gradients", size.flat_gradient - size.gradients)

    def _accumulate(self, unit: int) -> None:
        """The gradient is left whole, or is gone once it is added to the one that is there."""
        whole = self.sizes[unit].whole_gradient
        self._add("unsharded gradients", -whole)
        if unit not in self.accumulated:
            self.accumulated.add(unit)
            self._add("accumulated gradients", whole)
        self.settled = 0.0

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
            beside = size.reduced + (size.scattered if is_sharded else flat * (self.repeats > 1))
            self._observe("backward", name, "unsharded gradients", beside)
        self._add("unsharded gradients", -flat)
        if unit in self.accumulated:
            self.accumulated.remove(unit)
            self._add("accumulated gradients", -flat)
        if unit not in self.reduced:
            self.reduced.add(unit)
            self._add("reduced gradients", size.reduced)
        self.settled = 0.0

    def _gradient_bytes(self, unit: UnitProfile, operator: OperatorProfile) -> int:
        """In a unit that is not all frozen, frozen parameters have gradients, too: the flat parameter requires one."""
        return operator.gradient_bytes + (operator.frozen_bytes if unit.gradient_bytes else 0)
