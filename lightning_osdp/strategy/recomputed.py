"""Lightning's ``activation_checkpointing_policy``: blocks that recompute whatever a plan would choose."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)

from lightning_osdp.core.plan import Plan
from lightning_osdp.core.plan_unit import Block


def named_by_policy(module: nn.Module, policy: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the modules that recompute, none of them inside another.

    Args:
        module: the model, not wrapped yet; it is not changed.
        policy: as Lightning's strategy keeps it; empty where the user gave none.
    """
    if not policy:
        return ()
    if any(isinstance(child, CheckpointWrapper) for child in module.modules()):
        rank_zero_warn(
            "OSDP: the model has checkpointed layers of its own; activation_checkpointing_policy is ignored."
        )
        return ()
    found: set[nn.Module] = set()

    def note(child: nn.Module, **_: Any) -> nn.Module:
        found.add(child)
        return child

    apply_activation_checkpointing(module, checkpoint_wrapper_fn=note, **policy)
    names: list[str] = []
    for name, child in module.named_modules():
        if child in found and not _is_inside(name, names):
            names.append(name)
    return tuple(names)


def with_recomputed(plan: Plan, names: Collection[str]) -> Plan:
    """The plan to execute: these modules recompute, too, where it says nothing of them or of what is around them."""
    planned = [block.name for block in plan.blocks]
    more = [name for name in names if name not in planned and not _is_inside(name, planned)]
    kept = [block for block in plan.blocks if not _is_inside(block.name, more)]
    return replace(plan, blocks=(*kept, *(Block(name=name, activations="recompute") for name in more)))


def _is_inside(name: str, names: Collection[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in names)
