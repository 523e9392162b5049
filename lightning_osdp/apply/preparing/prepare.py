"""Preparation of a module and its plan: what is done in which order before a module is sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from lightning_osdp.apply.activations.blocks import with_recomputed
from lightning_osdp.apply.internals import access, dtensors
from lightning_osdp.apply.preparing.checks import check_shardable, make_contiguous, prepared
from lightning_osdp.apply.preparing.initialize import slices_of, unit_initializer
from lightning_osdp.apply.units import ShardedUnit
from lightning_osdp.core.axes import Treatment, freed_and_kept
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.slices import slice_names
from lightning_osdp.core.text.names import is_inside
from lightning_osdp.planner.engine import effects_of


def executed(plan: Plan, recomputed: Sequence[str]) -> Plan:
    """Plan as it is run: these modules recompute besides its blocks, and the root is kept whatever it says."""
    units = tuple(unit if unit.name else _kept(unit) for unit in plan.units)
    known = {block.name: block for block in plan.recomputable}
    blocks = tuple(
        block if block in plan.blocks else known.get(block.name, block)
        for block in with_recomputed(plan.blocks, recomputed)
    )
    names = [block.name for block in blocks if not block.kept]  # the others could still keep less
    left = (block for block in plan.recomputable if not is_inside(block.name, names))
    left = (block for block in left if not any(is_inside(name, [block.name]) for name in names))
    run = dataclasses.replace(plan, units=units, blocks=blocks, recomputable=tuple(left))
    return plan if run == plan else run


def _kept(root: Unit) -> Unit:
    return dataclasses.replace(root, treatments=tuple(freed_and_kept(each)[1] for each in root.treatments))


def treatments_by_name(unit: Unit) -> Iterator[tuple[str, Treatment]]:
    """Treatments of a unit of a plan, by the names that its slices have as units."""
    return zip(slice_names(unit.name, unit.num_slices), unit.treatments, strict=True)


def planned_treatments(plan: Plan) -> dict[str, Treatment]:
    """Treatments of all units of a plan, by the names that they and their slices have as units."""
    return dict(each for unit in plan.units for each in treatments_by_name(unit))


def begin(
    module: nn.Module,
    device: torch.device,
    *,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = False,
) -> Callable[[nn.Module], None]:
    """Checks that a module can be sharded; returns a function that gives a unit's tensors storage and values."""
    access.check_torch()
    dtensors.read_whole_values()
    dtensors.set_values()
    check_shardable(module)
    make_contiguous(module)
    initialize: Callable[[nn.Module], None]
    if param_init_fn is None:
        initialize = unit_initializer(module, device) or access.do_nothing
    else:
        initialize = partial(_initialize, param_init_fn)
    if sync_module_states:
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)
                dist.broadcast(tensor.data, src=0)
    return initialize


def planned_units(
    module: nn.Module, plan: Plan, initialize: Callable[[nn.Module], None], precision: MixedPrecision | None
) -> Iterator[ShardedUnit]:
    """Yields the units of a plan whose weights are gathered, with operators split, root first."""
    modules = prepared(module, plan, precision)
    for unit in plan.units:
        if effects_of(unit.treatments[0]).exchanges:
            continue
        if unit.num_slices == 1:
            parts = [tuple(modules[name] for name in unit.wrapped_modules)]
        else:
            parts = [(each,) for each in slices_of(modules[unit.name], unit.num_slices, initialize)]
        yield from (
            ShardedUnit(name, part, treatment, unit.is_read)
            for (name, treatment), part in zip(treatments_by_name(unit), parts, strict=True)
        )


def _initialize(param_init_fn: Callable[[nn.Module], None], unit: nn.Module) -> None:
    """Initialises modules with tensors on the meta device by the function of the user."""
    for child in unit.modules():
        if any(tensor.is_meta for tensor in (*child.parameters(recurse=False), *child.buffers(recurse=False))):
            param_init_fn(child)
