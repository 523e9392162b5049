"""A plan for a module, and another one while it is being trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_osdp.apply.fsdp2.arguments import fully_shard_arguments
from lightning_osdp.apply.fsdp2.internals import owner_of
from lightning_osdp.apply.sharded import ShardedModel
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import ConfigurationError


def apply_plan(module: nn.Module, plan: Plan, *, device: torch.device, **fsdp_kwargs: Any) -> nn.Module:
    """Shards a module as a plan says; returns it. Call it on all ranks of the default process group.

    The module is changed in place: its parameters are sharded, operators with several slices are split (see
    `lightning_osdp.splitting`), and blocks get another forward (see `apply_activations`).

    Where any rank has tensors on the meta device, all ranks start with rank 0's values: those that rank 0 has, and what
    ``reset_parameters`` of the modules makes there of the others. Each unit gets storage only when it is to be sharded.

    Args:
        module: the model that the plan was made for, not sharded yet.
        plan: what to shard how. The root unit stays gathered from forward to the end of backward whatever its mode.
        device: where the parameters go.
        **fsdp_kwargs: ``mixed_precision``, ``param_init_fn`` and ``sync_module_states``, as of Lightning's
            ``FSDPStrategy``.

    Raises:
        PlanMismatchError: the module of a unit or block is not there or cannot be one, operators' parameters would end
            up in another unit, or the model has parameters that the plan does not know.
        ConfigurationError: the plan or an argument asks for what ``fully_shard`` cannot do.
        ProfileError: a module on the meta device cannot initialise itself, or initialises another unit.
    """
    return ShardedModel.planned(module, plan, device=device, **fully_shard_arguments(fsdp_kwargs)).module


def change_plan(module: nn.Module, plan: Plan) -> None:
    """Has a module go on under another plan, between two optimizer steps. Call it on all ranks.

    What may differ is how units are sharded (``modes``), when they reduce gradients (``sync``), what blocks do with
    what they save (``blocks``), prefetching and ``asynchronous_unshard``. Nothing else changes: parameters, names,
    states and random numbers are what they are under one plan alone, and so are the weights that come of it, but for
    the order in which ``sync`` has gradients added up.

    A Trainer's ``strategy.plan`` and checkpoints follow; its table and plan file are those that fit began with. On an
    error nothing has changed, and it is raised on all ranks.

    Args:
        module: sharded by `apply_plan` or a Trainer.
        plan: what to go on with, the same on all ranks. For its predictions and notes nobody asks.

    Raises:
        PlanMismatchError: the plan differs in what cannot change - its model, the number of ranks, units,
            slices, or micro-batches -, it names a block that is not there, or ranks have different plans.
        PlanFormatError: it has a value that no plan can have.
        ConfigurationError: the module is not sharded by a plan, or a step is going on: this is forward
            or backward, backward has not been called yet, or gradients are not reduced yet.
    """
    owner = owner_of(module)
    if not isinstance(owner, ShardedModel):
        raise ConfigurationError(
            f"Expected a module that apply_plan, or a Trainer with strategy='osdp', sharded, got"
            f" {type(module).__name__}. Give it the whole module and not a part of it."
        )
    owner.use(plan)
