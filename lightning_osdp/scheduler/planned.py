"""What was assigned, as the units of a plan: the slices of an operator are one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_osdp.assign import Assignment, Modes, Setting, chosen_activations
from lightning_osdp.core.blocks import freed_bytes
from lightning_osdp.core.modes import freed_and_kept
from lightning_osdp.core.plans.plan import Block, Unit
from lightning_osdp.core.profile import BlockProfile
from lightning_osdp.core.slices import slice_names
from lightning_osdp.cost import block_s

_MOST_KINDS = 64
"""Units that are told apart where each takes a simulated step."""


def planned(assignment: Assignment) -> tuple[Unit, ...]:
    """Units of a plan, root first, then in forward order."""
    return tuple(_units(assignment.setting, assignment.modes))


def _units(setting: Setting, modes: Modes) -> Iterator[Unit]:
    costs, saves_s = setting.costs, _keeping_saves_s(setting, modes)
    places = {unit.name: index for index, unit in enumerate(setting.units)}
    slices = {name: slice_names(name, number) for name, number in setting.decided.num_slices.items()}
    whole = {part: name for name, parts in slices.items() for part in parts}
    for unit in setting.units:
        name = whole.get(unit.name, unit.name)
        parts = slices.get(name, (name,))
        if unit.name != parts[0]:
            continue
        each = [(places[part], modes[places[part]]) for part in parts]
        parameter_bytes = sum(setting.units[index].gathered_bytes for index, _ in each)
        yield Unit(
            name=name,
            operators=(name,) if name in slices else tuple(operator.name for operator in unit.operators),
            kind=unit.kind,
            modes=tuple(mode.name for _, mode in each),
            modules=unit.modules,
            sync=each[0][1].sync,
            parameter_bytes=parameter_bytes,
            time_s=sum(costs.times_s[index][mode] for index, mode in each),
            keep_saves_s=sum(saves_s[index] for index, _ in each),
            keep_costs_bytes=0 if unit.is_root else parameter_bytes,
            accumulate_saves_s=sum(costs.accumulating_saves_s(index, mode) for index, mode in each),
            accumulate_costs_bytes=sum(costs.accumulating_costs_bytes(index, mode) for index, mode in each),
        )


def _keeping_saves_s(setting: Setting, modes: Modes) -> list[float]:
    """Seconds that keeping each unit gathered saves, or would save, in this plan.

    Where communication overlaps computing, one unit of each kind is changed and the step simulated; where there are
    too many kinds for that, it is what the unit saves if nothing overlaps.
    """
    kinds = [(unit.kind, unit.gathered_bytes, mode) for unit, mode in zip(setting.units, modes, strict=True)]
    first = {kind: index for index, kind in reversed([*enumerate(kinds)])}
    if not setting.overlaps or len(first) > _MOST_KINDS:
        return [setting.costs.keeping_saves_s(unit, mode) for unit, mode in enumerate(modes)]
    saved_s = {kind: _saved_in_step_s(setting, modes, unit) for kind, unit in first.items()}
    return [saved_s[kind] for kind in kinds]


def _saved_in_step_s(setting: Setting, modes: Modes, unit: int) -> float:
    if setting.units[unit].is_root:
        return 0.0
    own = modes[unit]
    ways = (replace(mode, sync=own.sync, activations=own.activations) for mode in freed_and_kept(own))
    sharded_s, kept_s = (setting.costs.step_time_s((*modes[:unit], mode, *modes[unit + 1 :])) for mode in ways)
    return max(0.0, sharded_s - kept_s)


def planned_blocks(assignment: Assignment) -> tuple[Block, ...]:
    """Blocks of a plan that do not keep what they save, in forward order."""
    setting = assignment.setting
    chosen = chosen_activations(setting, assignment.modes)
    changed = (block for block in setting.unchanged.blocks if block.name in chosen)
    return tuple(_block(setting, block, chosen[block.name]) for block in changed)


def recomputable_blocks(assignment: Assignment) -> tuple[Block, ...]:
    """Blocks that keep what they save and would free some of it by recomputing, in forward order."""
    setting = assignment.setting
    chosen = chosen_activations(setting, assignment.modes)
    keeping = (block for block in setting.unchanged.blocks if block.name not in chosen)
    found = (_block(setting, block, "recompute") for block in keeping if "recompute" in block.segments)
    return tuple(block for block in found if block.frees_bytes > 0)


def _block(setting: Setting, block: BlockProfile, choice: str) -> Block:
    micro_batch_size, num_micro_batches = setting.workload.micro_batch_size, setting.workload.num_micro_batches
    return Block(
        name=block.name,
        activations=choice,
        frees_bytes=max(0, round(freed_bytes(setting.unchanged, block, choice).at(micro_batch_size))),
        costs_s=num_micro_batches * block_s(block, choice, setting.cluster, micro_batch_size),
    )
