"""Another plan for a module that is being trained."""

from __future__ import annotations

from torch import nn

from lightning_osdp.apply.fsdp2.internals import owner_of
from lightning_osdp.apply.sharded import ShardedModel
from lightning_osdp.core.plan import Plan
from lightning_osdp.errors import ConfigurationError


def change_plan(module: nn.Module, plan: Plan) -> None:
    """Has a module go on under another plan, between two optimizer steps. Call it on all ranks.

    What may differ is how units are sharded (``modes``), when they reduce gradients (``sync``), what blocks do with
    what they save (``blocks``), prefetching and ``asynchronous_unshard``. Nothing else changes: parameters, names,
    states and random numbers are what they are under one plan alone, and so are the weights that come of it, but for
    the order in which ``sync`` has gradients added up.

    A Trainer's ``strategy.plan`` and checkpoints follow; its table and plan file are those that fit began with. On an
    error nothing has changed, and it is raised on all ranks.

    Args:
        module: sharded by `apply_plan` or a Trainer, under ``engine="fsdp2"``.
        plan: what to go on with, the same on all ranks. For its predictions and notes nobody asks.

    Raises:
        PlanMismatchError: the plan differs in what cannot change - its engine, its model, the number of ranks, units,
            slices, or micro-batches -, it names a block that is not there, or ranks have different plans.
        PlanFormatError: it has a value that no plan can have.
        ConfigurationError: the module is not sharded by a plan under ``fsdp2``, or a step is going on: this is forward
            or backward, backward has not been called yet, or gradients are not reduced yet.
    """
    owner = owner_of(module)
    if not isinstance(owner, ShardedModel):
        raise ConfigurationError(
            f"Expected a module that apply_plan, or a Trainer with strategy='osdp', sharded under engine='fsdp2', got"
            f" {type(module).__name__}. Give it the whole module and not a part of it; under engine='fsdp1' plans do"
            " not change."
        )
    owner.use(plan)
