"""Applying a plan to a module, changing it while the module is trained, and arguments that users may add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_osdp.apply.preparing.prepare import executed
from lightning_osdp.apply.sharded import ShardedModel, sharded_as
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import ConfigurationError

_TAKEN = ("mixed_precision", "param_init_fn", "sync_module_states")
_REFUSED = {
    "limit_all_gathers": "fully_shard frees what it gathered in the order of computing, with no limit to switch off",
    "use_orig_params": "fully_shard never makes flat parameters",
}
_DEFAULTS = {"limit_all_gathers": True, "use_orig_params": True}
"""Values of options that ask for what ``fully_shard`` does anyway."""


def apply_plan(module: nn.Module, plan: Plan, *, device: torch.device, **fsdp_kwargs: Any) -> nn.Module:
    """Shards a module as a plan says; returns it. Call it on all ranks of the default process group.

    The module is changed in place: its parameters are sharded, operators with several slices are computed slice
    by slice, and blocks that keep less for backward get another forward.

    Where any rank has tensors on the meta device, all ranks start with the values of rank 0. There, tensors on the meta
    device get values from ``reset_parameters`` of their modules. Each unit gets storage only when it is to be sharded.

    Args:
        module: the model that the plan was made for, not sharded yet.
        plan: the plan. The root unit stays unsharded from forward to the end of backward whatever its mode, which
            says over which ranks it is sharded.
        device: where the parameters go.
        **fsdp_kwargs: ``mixed_precision``, ``param_init_fn`` and ``sync_module_states``, as of Lightning's
            ``FSDPStrategy``.

    Raises:
        PlanFormatError: the plan has a value that no plan can have.
        PlanMismatchError: the module of a unit or block is not there or cannot be one, operators' parameters would end
            up in another unit, or the model has parameters that the plan does not know.
        ConfigurationError: the plan or an argument asks for what ``fully_shard`` cannot do.
        ProfileError: a module on the meta device cannot initialise itself, or initialises another unit.
    """
    executed(plan, ()).check()
    return ShardedModel.planned(module, plan, device=device, **fully_shard_arguments(fsdp_kwargs)).module


def change_plan(module: nn.Module, plan: Plan) -> None:
    """Changes the plan of a module between two optimizer steps. Call it on all ranks.

    Plans may differ in what forward leaves of units (``keep`` of their treatments), when units reduce gradients
    (``sync``), how blocks save tensors (``blocks``), prefetching and ``asynchronous_unshard``. Parameters, names,
    states and random numbers stay as they are. Weights become those of a fit under one plan, up to rounding: ``sync``
    has gradients added up in another order.

    A Trainer's ``strategy.plan`` and checkpoints follow; its table and plan file are those that fit began with. On an
    error nothing has changed, and it is raised on all ranks.

    Args:
        module: sharded by `apply_plan` or a Trainer.
        plan: the new plan, the same on all ranks; its predictions and notes do not matter.

    Raises:
        PlanMismatchError: the plan differs in what cannot change - its model, the number of ranks, units,
            slices, over which ranks a unit is sharded, or micro-batches -, it names a block that is not there, or
            ranks have different plans.
        PlanFormatError: it has a value that no plan can have.
        ConfigurationError: the module is not sharded by a plan, or a step is going on: this is forward
            or backward, backward has not been called yet, or gradients are not reduced yet.
    """
    sharded = sharded_as(module)
    if sharded is None:
        raise ConfigurationError(
            f"Expected a module that apply_plan, or a Trainer with strategy='osdp', sharded, got"
            f" {type(module).__name__}. Give it the whole module and not a part of it."
        )
    sharded.use(plan)


def fully_shard_arguments(fsdp_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with a counterpart of ``fully_shard``; raises a `ConfigurationError` about one without."""
    arguments = {name: value for name, value in fsdp_kwargs.items() if name in _TAKEN}
    for name, value in fsdp_kwargs.items():
        if name not in _TAKEN and value is not None and value != _DEFAULTS.get(name):
            why = _REFUSED.get(name, "fully_shard has no such option")
            raise ConfigurationError(f"OSDPStrategy cannot take {name}={value!r}: {why}. Leave it out.")
    precision = arguments.get("mixed_precision")
    if precision is not None and precision.keep_low_precision_grads:
        raise ConfigurationError(
            "OSDPStrategy cannot take MixedPrecision(keep_low_precision_grads=True): fully_shard gives reduced"
            " gradients the dtype of the parameters. Leave it out."
        )
    return arguments
