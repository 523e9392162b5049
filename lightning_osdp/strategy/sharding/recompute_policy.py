"""Lightning's ``activation_checkpointing_policy``: blocks that recompute whatever a plan would choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)

from lightning_osdp.apply import is_inside


def named_by_policy(module: nn.Module, policy: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the modules that recompute, none of them inside another.

    Args:
        module: the model, not sharded yet; it is not changed.
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
        if child in found and not is_inside(name, names):
            names.append(name)
    return tuple(names)
