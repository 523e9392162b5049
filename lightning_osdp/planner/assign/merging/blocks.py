"""Blocks that may recompute or offload what they save: units of their own, or with units inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from lightning_osdp.core.axes import KEEP
from lightning_osdp.core.units import UnitProfile, grouped, have_one_dtype, merged, outermost
from lightning_osdp.planner.assign.additive import Modes
from lightning_osdp.planner.assign.setting import Setting


def block_units(setting: Setting, activations: Sequence[str] = (KEEP,)) -> list[Setting]:
    """The setting with a unit for every block, which may do with what it saves as it likes, where there are any.

    First with the other units as they are, then with the root instead of them, or its children where that
    may be, as users of ``fully_shard`` have it: it gathers them at once, and the root keeps them gathered.
    """
    return setting.variants.once(setting, ("blocks", *activations), lambda: _block_units(setting, activations))


def _block_units(setting: Setting, activations: Sequence[str]) -> Iterator[Setting]:
    offered = {choice for choice in activations if choice != KEEP}
    names = [block.name for block in setting.profile.blocks if not offered or offered & set(block.segments)]
    units = merged(setting.profile, setting.units, names) if names else None
    if units is None or not any(unit.block for unit in units):
        return
    for found in dict.fromkeys((units, _rest_in_root(setting, units))):
        if offered or found != setting.units:
            yield dataclasses.replace(setting, units=found, activations=tuple(activations))


def _rest_in_root(setting: Setting, units: tuple[UnitProfile, ...]) -> tuple[UnitProfile, ...]:
    """Units as they are where one outside of blocks has to stay."""
    rest = [operator for unit in units if unit.block is None for operator in unit.operators]
    members = outermost(rest)
    has_to_stay = any(operator.stands_alone or "" not in operator.enclosing for operator in rest)
    if has_to_stay or not all(map(have_one_dtype, members.values())):
        return units
    members |= {unit.name: list(unit.operators) for unit in units if unit.block is not None}
    return grouped(
        setting.profile, {name: [operator.name for operator in operators] for name, operators in members.items()}
    )


def chosen_activations(setting: Setting, modes: Modes) -> dict[str, str]:
    """Blocks that do not keep what they save -> what they do, with these modes, one per unit."""
    chosen = {unit.name: mode["saves"] for unit, mode in zip(setting.units, modes, strict=True)}
    return {name: choice for name, choice in {**chosen, **setting.decided.blocks}.items() if choice != KEEP}
