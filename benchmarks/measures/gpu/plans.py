"""Plans of the checks, by hand: units freed and kept by turns, and one more for each further kind of decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from benchmarks.families import BLOCKS, Family
from benchmarks.measures.beside_fsdp.cases import RESIDENT
from benchmarks.measures.gpu.models import unit_names
from benchmarks.testbed.plans import plan_of
from lightning_osdp import ModelProfile
from lightning_osdp.core.axes import LEVELS, STATIONARY, Treatment
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.core.plans.plan import Plan


def mixed_plan(module: Family, world_size: int, num_samples: int) -> Plan:
    """Units freed and kept by turns."""
    modes = {name: ("ZDP", "DP")[index % 2] for index, name in enumerate(unit_names(module))}
    return plan_of(module, modes, world_size=world_size, micro_batch_size=num_samples)


def _with_resident(module: Family, world_size: int, num_samples: int) -> Plan:
    return RESIDENT.plan(module, world_size=world_size, micro_batch_size=num_samples)


def _with_levels(module: Family, world_size: int, num_samples: int) -> Plan:
    """Every other block keeps results of its first two heavy operations, the others none."""
    names = [name for name, child in module.named_modules() if isinstance(child, BLOCKS)]
    kept = [(0, 1) if place % 2 else () for place in range(len(names))]
    blocks = [
        Block(name=name, treatment=Treatment(saves=LEVELS[0] if results else "recompute"), kept=results)
        for name, results in zip(names, kept, strict=True)
    ]
    return replace(mixed_plan(module, world_size, num_samples), blocks=tuple(blocks))


def _with_exchanges(module: Family, world_size: int, num_samples: int) -> Plan:
    """The head moves activations."""
    modes = dict.fromkeys([*unit_names(module), "model.head"], "ZDP")
    plan = plan_of(module, modes, world_size=world_size, micro_batch_size=num_samples)
    units = (
        replace(unit, treatments=(STATIONARY,), exchange="column", parameter_bytes=0)
        if unit.name == "model.head"
        else unit
        for unit in plan.units
    )
    return replace(plan, units=tuple(units))


def _with_waiting(module: Family, world_size: int, num_samples: int) -> Plan:
    """All units reduce their gradients in the last of two micro-batches."""
    plan = replace(mixed_plan(module, world_size, num_samples), num_micro_batches=2)
    units = (replace(unit, treatments=tuple(each.but(sync="last") for each in unit.treatments)) for unit in plan.units)
    return replace(plan, units=tuple(units))


def _with_host(module: Family, world_size: int, num_samples: int) -> Plan:
    """The host updates all units."""
    plan = mixed_plan(module, world_size, num_samples)
    return replace(plan, units=tuple(unit.treated(states="host") for unit in plan.units))


_Decisions: TypeAlias = Mapping[str, tuple[str, Callable[[Family, int, int], Plan]]]
ON_DEVICE: _Decisions = {
    "resident": ("12 x 256, LoRA", _with_resident),
    "levels": ("mingpt", _with_levels),
    "stationary": ("mingpt", _with_exchanges),
    "waiting gradients": ("mingpt", _with_waiting),
}
"""Decision that `mixed_plan` has not -> the name of a model's family, and a plan of such a model, ranks and samples."""

DECISIONS: _Decisions = {**ON_DEVICE, "states on the host": ("mingpt", _with_host)}
"""All of these, and one by which the host waits for the device."""


def as_profiled(plan: Plan, profile: ModelProfile) -> Plan:
    """Returns the plan with the results that levels keep by the profile; blocks that have no such level recompute."""
    levels = {block.name: block.levels for block in profile.blocks}
    blocks = (
        replace(block, kept=levels[block.name][block.activations].kept)
        if block.activations in levels[block.name]
        else replace(block, treatment=Treatment(saves="recompute"), kept=())
        for block in plan.blocks
    )
    return replace(plan, blocks=tuple(blocks))
