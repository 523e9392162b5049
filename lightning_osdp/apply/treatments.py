"""Appliers: functions that carry out each axis of a unit's treatment when the unit is sharded, changed and run.

The axis of blocks is carried out by `activations.blocks.BlockForwards.choose`, in each forward of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_osdp.apply.internals import gathering, host_shards, resident
from lightning_osdp.apply.units import Meshes, ShardedUnit
from lightning_osdp.core.axes import AXES, Treatment
from lightning_osdp.planner.engine import effects_of


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Applier:
    """Functions that carry out one axis."""

    make: Callable[[ShardedUnit, Meshes], Mapping[str, Any]] = _nothing
    """Gives the arguments of ``fully_shard`` for a unit."""
    change: Callable[[ShardedUnit, Meshes], object] = _nothing
    """Makes a sharded unit follow its treatment: when it is new, and when this axis has changed between two steps."""
    accumulate: Callable[[ShardedUnit, bool], object] = _nothing
    """Called before micro-batches, for units that reduce gradients differently in the last one, with whether it
    comes."""


def _leave(unit: ShardedUnit, meshes: Meshes) -> None:
    """Sets what forward leaves of a unit: all, a shard in each node, or nothing. The root is always kept.

    A resident unit that somebody unfreezes is kept to its backward, as any other, from then on.
    """
    if unit.name:
        effects = effects_of(unit.treatment)
        nodes = meshes.nodes if effects.leaves_shard else None
        gathering.reshard_after_forward(unit.handle, is_kept=effects.is_kept, nodes=nodes)
        resident.set_resident(unit.handle, is_resident=effects.is_resident)


def _sync(unit: ShardedUnit, is_last: bool) -> None:
    """Sets whether backward reduces gradients, or reduces them between nodes.

    A unit that stays from one micro-batch to the next is resharded in the backward that reduces.
    """
    effects = effects_of(unit.treatment)
    if not effects.holds_whole_gradients:
        unit.handle.set_requires_all_reduce(is_last, recurse=False)
        return
    unit.handle.set_requires_gradient_sync(is_last, recurse=False)
    if effects.stays and not effects.is_resident:
        unit.handle.set_reshard_after_backward(is_last, recurse=False)


def _place(unit: ShardedUnit, meshes: Meshes) -> Mapping[str, Any]:
    """Gives what puts a unit's shard on the host, where it is to be there."""
    on_host = effects_of(unit.treatment).shard_on_host
    return {"offload_policy": host_shards.policy(meshes.device)} if on_host else {}


def _copy_in(unit: ShardedUnit, _: Meshes) -> None:
    """Has all-gathers copy a unit's shard from the host, if it is there."""
    if effects_of(unit.treatment).shard_on_host:
        host_shards.keep(unit.handle)


APPLIERS: Mapping[str, Applier] = {
    "moves": Applier(),  # units that move activations are none of `fully_shard`: see `exchanging`
    "home": Applier(make=lambda unit, meshes: {"mesh": meshes.mesh_for(unit.treatment)}),
    "keep": Applier(
        make=lambda unit, _: {"reshard_after_forward": not effects_of(unit.treatment).is_kept}, change=_leave
    ),
    "sync": Applier(accumulate=_sync),
    "states": Applier(),  # optimizers carry it out, where they step and are loaded: see `host_updates`
    "shard": Applier(make=_place, change=_copy_in),
}
"""Applier of each axis of units."""


def arguments_of(unit: ShardedUnit, meshes: Meshes) -> dict[str, Any]:
    """Arguments of ``fully_shard`` that a unit's treatment asks for."""
    return {name: value for each in APPLIERS.values() for name, value in each.make(unit, meshes).items()}


def change(unit: ShardedUnit, meshes: Meshes, before: Treatment | None) -> None:
    """Makes a unit follow its treatment on axes that can change and differ from the one before; None: on all axes."""
    for axis, applier in APPLIERS.items():
        if before is None or (AXES[axis].can_change and before[axis] != unit.treatment[axis]):
            applier.change(unit, meshes)


def accumulate(units: Sequence[ShardedUnit], *, is_last: bool) -> None:
    """Prepares units that wait with their gradients for the last micro-batch for it, or for an earlier one."""
    for unit in units:
        if effects_of(unit.treatment).waits:
            for applier in APPLIERS.values():
                applier.accumulate(unit, is_last)
