"""State of an optimizer of a model under FSDP1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import _get_param_to_fqns
from torch.optim import Optimizer

from lightning_osdp.apply.optimizer_state import named
from lightning_osdp.splitting import cut_states, cuts_of, join_names, join_states


def named_state(root: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State by name, within `full_state` or `sharded_state`; empty on ranks that are not to have it."""
    state = FullyShardedDataParallel.optim_state_dict(root, optimizer)
    return join_states(state, cuts_of(root)) if "param_groups" in state else {}


def load_state(root: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads state by name or by number, within `full_state` or `sharded_state`. Call it on all ranks.

    Raises:
        PlanMismatchError: its parameter groups are not the optimizer's.
    """
    cuts, names_of = cuts_of(root), _get_param_to_fqns(root)
    groups = [
        join_names([name for parameter in group["params"] for name in names_of[parameter]], cuts)
        for group in optimizer.param_groups
    ]
    flat = FullyShardedDataParallel.optim_state_dict_to_load(
        model=root, optim=optimizer, optim_state_dict=cut_states(named(state, groups), cuts)
    )
    optimizer.load_state_dict(flat)
