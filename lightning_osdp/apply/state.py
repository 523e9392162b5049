"""State of a module under ``fully_shard`` and of its optimizers, whole or sharded, under the user's own names.

Whole state is gathered one parameter at a time: besides what it keeps, no rank holds more than one of them and what an
all-gather takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.splitting import JoinedShards, cuts_of, gathered, join_states


def whole_state(module: nn.Module, *, on_all_ranks: bool) -> dict[str, Any] | None:
    """Whole state dict in memory of its own on CPU, on rank 0 or on all ranks; None on the others.

    All ranks must call it. What the module's ``state_dict`` hooks see and return are DTensors.
    """
    keeps = on_all_ranks or dist.get_rank() == 0
    state: dict[str, Any] = module.state_dict()
    whole: dict[str, Any] = {}
    first_names = {parameter: name for name, parameter in module.named_parameters()}
    ties = {name: first_names[parameter] for name, parameter in module.named_parameters(remove_duplicate=False)}
    for name, value in state.items():
        first = ties.get(name, name)
        is_tied = first in whole and _is_same(state[first], value)
        whole[name] = whole[first] if is_tied else _whole(value, keeps=keeps)
    state.update(whole)  # it may know versions of modules, which are saved with it
    return state if keeps else None


def model_state(module: nn.Module, state_dict_type: str) -> dict[str, Any]:
    """State dict with whole tensors on rank 0 and nothing on the others ("full"), or each rank's shards ("sharded").

    All ranks must call it. Shards are DTensors in the parameters' own memory, or `JoinedShards` of split operators.
    """
    return module.state_dict() if state_dict_type == "sharded" else whole_state(module, on_all_ranks=False) or {}


def optimizer_state(module: nn.Module, optimizer: Optimizer, state_dict_type: str) -> dict[str, Any]:
    """State of one optimizer, likewise: by parameter index as a plain optimizer's ("full"), or by name ("sharded").

    Raises:
        ConfigurationError: the optimizer is not one of this module's parameters, or the slices of an operator are in
            several of its parameter groups.
    """
    names = [name for group in names_by_group(module, optimizer) for name in group]
    packed = optimizer.state_dict()
    state = join_states(
        {
            "state": {names[number]: fields for number, fields in packed["state"].items()},
            "param_groups": [
                {**group, "params": [names[number] for number in group["params"]]} for group in packed["param_groups"]
            ],
        },
        cuts_of(module),
    )
    for group in state["param_groups"]:
        if "param_names" in group:  # of an optimizer of named_parameters(): slices have no names of their own
            group["param_names"] = list(group["params"])
    if state_dict_type == "sharded":
        return state
    keeps = dist.get_rank() == 0
    whole = {
        name: {field: _whole(value, keeps=keeps) for field, value in fields.items()}
        for name, fields in state["state"].items()
    }
    return numbered({**state, "state": whole}) if keeps else {}


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


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by their names in the user's own module, as DTensors or `JoinedShards`; tied ones under each name."""
    found = {name: parameter.detach() for name, parameter in module.named_parameters(remove_duplicate=False)}
    for cut in cuts_of(module):
        found[cut.whole] = cut.join([found.pop(piece) for piece in cut.pieces])
    return found


def names_by_group(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters in each group of an optimizer, as the module has them; a tied one has its first name.

    Raises:
        ConfigurationError: there are other parameters in it.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    other = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if other:
        raise ConfigurationError(
            f"Expected an optimizer of the parameters that {type(module).__name__} has now that it is sharded, got one"
            f" with {len(other)} others, the first of shape {tuple(other[0].shape)}. Configure the optimizer after the"
            " module is sharded, and not while parameters are gathered, as after an evaluation."
        )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _is_same(shards: Any, other: Any) -> bool:
    """Whether two entries of a state dict are one parameter; all ranks find the same."""
    return (
        isinstance(shards, DTensor)
        and isinstance(other, DTensor)
        and (shards.shape, shards.dtype) == (other.shape, other.dtype)
        and shards.to_local().untyped_storage()._cdata == other.to_local().untyped_storage()._cdata
    )


def _whole(value: Any, *, keeps: bool) -> Any:
    """A tensor whole and in memory of its own, or None; anything else as it is. All ranks must call it."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, JoinedShards):
        whole = value.full_tensor()
    elif isinstance(value, DTensor):
        whole = gathered(value.detach())
    else:
        return value.detach().to("cpu", copy=True) if keeps else None
    is_part = whole.untyped_storage().nbytes() != whole.nbytes  # of a buffer with padding
    return whole.to("cpu", copy=is_part) if keeps else None
