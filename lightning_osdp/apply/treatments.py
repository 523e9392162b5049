"""Appliers: what carries each axis of a unit's treatment out, when it is sharded, changed and run.

What blocks do with what they save is chosen in each of their forwards: see `activations.blocks.BlockForwards.choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_osdp.apply.internals import gathering
from lightning_osdp.apply.units import Meshes, ShardedUnit
from lightning_osdp.core.axes import AXES, Treatment
from lightning_osdp.engine import effects_of


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Applier:
    """What is done for one axis."""

    make: Callable[[ShardedUnit, Meshes], Mapping[str, Any]] = _nothing
    """Arguments of ``fully_shard`` for a unit."""
    change: Callable[[ShardedUnit, Meshes], object] = _nothing
    """Makes a sharded unit's treatment true, when it is new, and when it has changed in this axis between two steps."""
    accumulate: Callable[[ShardedUnit, bool], object] = _nothing
    """Is told before micro-batches, of units that reduce their gradients in another way in the last one, whether the
    last one comes."""


def _leave(unit: ShardedUnit, meshes: Meshes) -> None:
    """Has forward leave a unit unsharded, a shard of it in each node, or nothing; the root stays whatever it says."""
    if unit.name:
        effects = effects_of(unit.treatment)
        nodes = meshes.nodes if effects.leaves_shard else None
        gathering.reshard_after_forward(unit.handle, is_kept=effects.is_kept, nodes=nodes)


def _reduce(unit: ShardedUnit, is_last: bool) -> None:
    """Has backward reduce gradients, or do so between nodes; else a unit that stays is not resharded either."""
    effects = effects_of(unit.treatment)
    if not effects.holds_whole_gradients:
        unit.handle.set_requires_all_reduce(is_last, recurse=False)
        return
    unit.handle.set_requires_gradient_sync(is_last, recurse=False)
    if effects.stays:
        unit.handle.set_reshard_after_backward(is_last, recurse=False)


APPLIERS: Mapping[str, Applier] = {
    "home": Applier(make=lambda unit, meshes: {"mesh": meshes.of(unit.treatment)}),
    "keep": Applier(
        make=lambda unit, _: {"reshard_after_forward": not effects_of(unit.treatment).is_kept}, change=_leave
    ),
    "reduce": Applier(accumulate=_reduce),
}
"""One for each axis of units."""


def arguments_of(unit: ShardedUnit, meshes: Meshes) -> dict[str, Any]:
    """What a unit's treatment asks of ``fully_shard``."""
    return {name: value for each in APPLIERS.values() for name, value in each.make(unit, meshes).items()}


def change(unit: ShardedUnit, meshes: Meshes, before: Treatment | None) -> None:
    """Makes a unit's treatment true where it differs from the one before; None: everywhere."""
    for axis, applier in APPLIERS.items():
        if before is None or (AXES[axis].can_change and before[axis] != unit.treatment[axis]):
            applier.change(unit, meshes)


def accumulate(units: Sequence[ShardedUnit], *, is_last: bool) -> None:
    """Tells units that wait for the last micro-batch with their gradients whether it comes."""
    for unit in units:
        if effects_of(unit.treatment).waits:
            for applier in APPLIERS.values():
                applier.accumulate(unit, is_last)
