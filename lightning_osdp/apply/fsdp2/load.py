"""Loading into a module under ``fully_shard`` and its optimizers: each rank takes its rows of what is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_osdp.apply.fsdp2.state import names_by_group, sharded_state, whole_parameters
from lightning_osdp.apply.optimizer_state import named
from lightning_osdp.apply.sharded_checkpoint import read_optimizers
from lightning_osdp.errors import PlanMismatchError
from lightning_osdp.splitting import cut_states, cuts_of, join_names


def load_model(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Loads a whole state dict; all ranks must call it, with the same.

    Args:
        module: a module whose parameters are DTensors, rows of each on every rank.
        state: of the whole module, on CPU. Of tensors that are mapped from a file only this rank's rows are read.
            The module's own hooks see whole tensors.
        strict: whether all that is missing or unexpected is an error.

    Raises:
        RuntimeError: the state is of another module, as ``load_state_dict`` says it.
    """
    module.load_state_dict(state, strict=strict)


def takes_whole(module: nn.Module) -> list[RemovableHandle]:
    """Has a module's own ``load_state_dict`` take whole tensors; returns what ends that.

    These are the last of each module's hooks: users' own may rename or reshape whole tensors before.
    """
    return [part.register_load_state_dict_pre_hook(_take_rows) for part in module.modules() if _holds_shards(part)]


def load_optimizer(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads state of one optimizer; all ranks must call it.

    Args:
        module: the module that it trains.
        optimizer: of the module's sharded parameters.
        state: by name, or by index as a plain optimizer's, for whole operators; whole or in shards.

    Raises:
        ConfigurationError: the optimizer is not one of this module's parameters.
        PlanMismatchError: the state's parameter groups are others.
    """
    cuts, groups = cuts_of(module), names_by_group(module, optimizer)
    whole_groups = [join_names(names, cuts) for names in groups]
    saved = _check_names(named(state, whole_groups), whole_groups)
    fields_of = cut_states(saved["state"], cuts)
    parameters = dict(module.named_parameters())
    numbers = {name: number for number, name in enumerate(chain.from_iterable(groups))}
    optimizer.load_state_dict(
        {
            "state": {
                numbers[name]: {field: _own_rows(value, parameters[name]) for field, value in fields.items()}
                for name, fields in fields_of.items()
            },
            "param_groups": [
                {
                    **{key: value for key, value in group.items() if key != "param_names"},
                    "params": [numbers[name] for name in names],
                }
                for group, names in zip(saved["param_groups"], groups, strict=True)
            ],
        }
    )


def load_sharded(path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool) -> None:
    """Loads model and optimizers from the folder of a sharded checkpoint, of any number of ranks.

    Those that an earlier version wrote with FSDP1 are among them.

    All ranks must call it. Weights are read into the module's shards in place.

    Args:
        path: of the folder.
        module: a module whose parameters are DTensors, rows of each on every rank.
        optimizers: those to load; empty to leave optimizer state alone.
        strict: whether all of the module must be in the checkpoint.

    Raises:
        CheckpointException: something of the module is not in the checkpoint, or has another shape there.
        RuntimeError: another number of optimizers is stored.
        PlanMismatchError: a stored optimizer has other parameter groups.
    """
    state = {"model": sharded_state(module)}
    load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=not strict))
    module.load_state_dict(state["model"], strict=strict)
    states = read_optimizers(path, len(optimizers), whole_parameters(module))
    for optimizer, saved in zip(optimizers, states, strict=False):  # without state none is stored
        load_optimizer(module, optimizer, saved)


def _holds_shards(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module._parameters.values())


def _take_rows(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Puts shards in place of a module's own whole parameters, but for those of another shape."""
    parameters: dict[str, Any] = dict(module._parameters)
    for name, parameter in parameters.items():
        whole = state_dict.get(f"{prefix}{name}")
        if isinstance(parameter, DTensor) and isinstance(whole, Tensor) and whole.shape == parameter.shape:
            state_dict[f"{prefix}{name}"] = _rows(whole, parameter)


def _rows(whole: Tensor, like: DTensor) -> DTensor:
    """The rows of a whole tensor that this rank has of another one, as a view; a DTensor as it is."""
    if isinstance(whole, DTensor):
        return whole
    mesh, local = like.device_mesh, like.to_local()
    first = min(mesh.get_local_rank() * -(-len(like) // mesh.size()), len(like))  # as torch.chunk cuts
    rows = whole.detach().narrow(0, first, len(local))
    return DTensor.from_local(rows, mesh, like.placements, shape=like.shape, stride=like.stride())


def _own_rows(value: Any, parameter: Tensor) -> Any:
    """A field of an optimizer's state in memory of its own, sharded as its parameter where it has the same shape."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return _rows(value, parameter).clone()
    return value.clone()


def _check_names(state: dict[str, Any], groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The state, if its groups are of these parameters.

    Raises:
        PlanMismatchError: they are not.
    """
    for index, (group, names) in enumerate(zip(state["param_groups"], groups, strict=True)):
        if set(group["params"]) != set(names):
            raise PlanMismatchError(
                f"Expected a checkpoint whose optimizer has in group {index} the parameters that are configured, but"
                f" {sorted(set(group['params']).symmetric_difference(names))[:3]} are in one of both only. Configure"
                " the groups that were saved, or load the weights alone."
            )
    return state
