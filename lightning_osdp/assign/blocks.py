"""Blocks that may recompute or offload what they save: units of their own, or with units inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lightning_osdp.assign.additive import Modes
from lightning_osdp.assign.setting import Setting
from lightning_osdp.core.blocks import with_activations
from lightning_osdp.core.units import merged


def block_units(setting: Setting, activations: Sequence[str]) -> Setting | None:
    """The setting with a unit for every block, which may do with what it saves as it likes; None where that is none.

    Args:
        setting: in which all blocks keep what they save.
        activations: what they may do.
    """
    names = [block.name for block in setting.profile.blocks if any(choice in block.segments for choice in activations)]
    units = merged(setting.profile, setting.units, names) if names else None
    if units is None or not any(unit.block for unit in units):
        return None
    return dataclasses.replace(setting, units=units, activations=tuple(activations))


def chosen_activations(setting: Setting, modes: Modes) -> dict[str, str]:
    """Blocks that do not keep what they save -> what they do, with these modes, one per unit."""
    chosen = {unit.name: mode.activations for unit, mode in zip(setting.units, modes, strict=True)}
    return {name: choice for name, choice in {**chosen, **setting.blocks}.items() if choice != "keep"}


def with_blocks(setting: Setting, activations: Mapping[str, str]) -> Setting:
    """The setting with its units as they are, and what blocks do decided.

    Args:
        setting: in which all blocks keep what they save, and no operator is split.
        activations: block -> what it does; those that are not named keep what they save.
    """
    profile = with_activations(setting.profile, activations)
    members = {unit.name: [operator.name for operator in unit.operators] for unit in setting.units}
    return setting.decided(profile, members, blocks=dict(activations))
