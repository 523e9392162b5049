"""State of an optimizer of a wrapped model, under the names of the unwrapped model or in a plain optimizer's numbers.

Numbers are those of the optimizer's own groups, as ``Optimizer.state_dict`` counts them: neither the order of the
model's parameters nor frozen ones matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import _get_param_to_fqns
from torch.optim import Optimizer

from lightning_osdp.errors import PlanMismatchError
from lightning_osdp.splitting import cut_states, cuts_of, join_names, join_states


def named_state(root: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State by name, within `full_state` or `sharded_state`; empty on ranks that are not to have it."""
    state = FullyShardedDataParallel.optim_state_dict(root, optimizer)
    return join_states(state, cuts_of(root)) if "param_groups" in state else {}


def numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    """State by number, as a plain optimizer's, from state by name."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {numbers[name]: state["state"][name] for name in names if name in state["state"]},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def load_state(root: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads state by name or by number, within `full_state` or `sharded_state`. Call it on all ranks.

    Raises:
        PlanMismatchError: its parameter groups are not the optimizer's.
    """
    cuts = cuts_of(root)
    # Shards have nothing of a state without entries, such as that of SGD without momentum.
    named = cut_states(_named({"state": {}, **state}, root, optimizer), cuts)
    flat = FullyShardedDataParallel.optim_state_dict_to_load(model=root, optim=optimizer, optim_state_dict=named)
    optimizer.load_state_dict(flat)


def _named(state: Mapping[str, Any], root: nn.Module, optimizer: Optimizer) -> Mapping[str, Any]:
    saved = [list(group["params"]) for group in state["param_groups"]]
    if len(saved) != len(optimizer.param_groups):
        raise PlanMismatchError(
            f"Expected a checkpoint whose optimizer has {len(optimizer.param_groups)} parameter groups, as configured,"
            f" got {len(saved)}. Configure the groups that were saved, or load the weights alone."
        )
    if not all(isinstance(number, int) for group in saved for number in group):
        return state
    names_of, cuts = _get_param_to_fqns(root), cuts_of(root)
    found = [
        join_names([name for parameter in group["params"] for name in names_of[parameter]], cuts)
        for group in optimizer.param_groups
    ]
    if [len(group) for group in saved] != [len(group) for group in found]:
        raise PlanMismatchError(
            f"Expected a checkpoint whose optimizer has {[len(group) for group in found]} parameters in its groups, as"
            f" configured, got {[len(group) for group in saved]}. Configure the groups that were saved, or load the"
            " weights alone."
        )
    names = {number: name for a, b in zip(saved, found, strict=True) for number, name in zip(a, b, strict=True)}
    return {
        "state": {names[number]: fields for number, fields in state["state"].items()},
        "param_groups": [
            {**group, "params": group_names} for group, group_names in zip(state["param_groups"], found, strict=True)
        ],
    }
