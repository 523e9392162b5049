"""Access to the objects that ``fully_shard`` makes of a unit, and checks that this torch has all that is used of them.

Every private name that the room uses stands in `_METHODS` or `_ATTRIBUTES`. `check_torch` and `check_units` refuse a
torch that lacks one of them. Names in `_DISPENSABLE` are not refused: training does without what they serve.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from lightning_osdp.errors import ConfigurationError

_TRIED = "2.13 to 2.15"
"""Versions of torch whose ``fully_shard`` was read and run."""
_METHODS = {
    FSDPModule: (
        "_orig_cls_mro_index",
        "_set_unshard_async_op",
        "set_reduce_scatter_unused_params",  # public, and of 2.13
    ),
    FSDPState: (
        "_cast_forward_inputs",
        "_cast_output_dtype",
        "_lazy_init",
        "_pre_forward",
        "_post_forward",
        "_pre_backward",
        "_register_pre_backward_hook",
        "_register_root_post_backward_final_callback",
        "_root_post_backward_final_callback",
    ),
    FSDPParamGroup: (
        "_prefetch_unshard",
        "_register_post_backward_hook",
        "_to_sharded",
        "_to_sharded_post_forward",
        "_to_unsharded",
        "is_sharded",
        "is_unsharded",
        "post_backward",
        "post_forward",
        "pre_backward",
        "pre_forward",
        "reshard",
        "unshard",
        "wait_for_unshard",
    ),
    FSDPParam: (
        "_init_sharded_post_forward_param_metadata",
        "_get_grad_inner_tensor",
        "_setattr_on_modules",
        "alloc_all_gather_outputs",
        "free_unsharded_param",
        "init_all_gather_outputs",
        "init_unsharded_param",
        "reset_sharded_param",
        "_sharded_local_tensor",
        "all_gather_inputs",
        "to_sharded_dtensor",
        "to_sharded_post_forward_dtensor",
        "to_unsharded",
    ),
    TrainingState: ("FORWARD", "PRE_BACKWARD", "POST_BACKWARD", "IDLE"),
}
"""Names that this room uses of classes."""
_ATTRIBUTES = {
    "state": (
        "_fsdp_param_groups",
        "_modules",
        "_modules_to_run_forward",
        "_pre_forward_hook_handle",
        "_post_forward_hook_handle",
        "_states_to_forward_prefetch",
        "_comm_ctx.all_gather_copy_in_stream",
        "_comm_ctx.all_gather_state",
        "_comm_ctx.all_gather_stream",
        "_comm_ctx.device_handle",
        "_comm_ctx.post_forward_order",
        "_comm_ctx.reduce_scatter_states",
        "_state_ctx.all_states",
        "_state_ctx.iter_forward_root",
        "_state_ctx.post_backward_final_callback_queued",
        "_training_state",
    ),
    "group": (
        "_all_gather_result",
        "_all_reduce_hook",
        "_module_fqn",
        "_module_to_pre_load_state_dict_hook_handle",
        "_module_to_pre_save_state_dict_hook_handle",
        "_partial_reduce_output",
        "_post_forward_indices",
        "_post_reduce_event",
        "_sharded_state",
        "_reduce_scatter_comm",
        "_reshard_after_forward_event",
        "_training_state",
        "all_reduce_grads",
        "comm_ctx",
        "device",
        "device_handle",
        "force_sum_reduction_for_comms",
        "fsdp_params",
        "gradient_divide_factor",
        "mesh_info.shard_mesh_rank",
        "mesh_info.shard_mesh_size",
        "mesh_info.shard_process_group",
        "modules",
        "post_forward_mesh_info",
        "reduce_grads",
        "reduce_scatter_unused_params",
        "reshard_after_backward",
    ),
    "parameter": (
        "_contiguous_orig_stride",
        "_module_info",
        "_orig_size",
        "_param_fqn",
        "_post_load_hook_handle",
        "_sharded_param_data",
        "_sharding_spec",
        "all_gather_outputs",
        "contiguous_sharded_stride",
        "device",
        "orig_dtype",
        "padded_sharded_param_size",
        "param_dtype",
        "post_forward_mesh_info",
        "reduce_dtype",
        "sharded_param",
        "sharded_size",
        "sharded_state",
        "unsharded_accumulated_grad",
    ),
}
"""Names that this room uses of objects of a unit. `_unsharded_param` of a parameter is not among them: it comes with
the first all-gather."""
IN_NODES = "a mode that leaves a shard in each node"
ON_HOST = "a shard on the host"
_AHEAD = "asynchronous_unshard, so that steps may take longer than predicted"
_AT_ONCE = "copies of all shards of a unit at once, on one rank"
_IN_TIME = "a peak as predicted, where units are replicated"
_ONCE = "that a tensor given to a unit twice arrives as one"
_QUICK = "a quick call of modules that find their unit unsharded"
WHOLE = "gathered(), and a fit of a model that was evaluated first"
_DISPENSABLE = {
    "FSDPModule._orig_cls_mro_index": WHOLE,
    "FSDPModule._set_unshard_async_op": _AHEAD,
    "FSDPParam._init_sharded_post_forward_param_metadata": IN_NODES,
    "FSDPParam.all_gather_inputs": ON_HOST,
    "FSDPParam.alloc_all_gather_outputs": _AT_ONCE,
    "FSDPParam.init_all_gather_outputs": _AT_ONCE,
    "FSDPParam.to_unsharded": _AT_ONCE,
    "FSDPParamGroup._register_post_backward_hook": _ONCE,
    "FSDPParamGroup._to_sharded_post_forward": IN_NODES,
    "group._module_to_pre_load_state_dict_hook_handle": WHOLE,
    "group._module_to_pre_save_state_dict_hook_handle": WHOLE,
    "group.post_forward_mesh_info": IN_NODES,
    "parameter._post_load_hook_handle": WHOLE,
    "parameter.device": ON_HOST,
    "parameter.param_dtype": ON_HOST,
    "parameter.post_forward_mesh_info": IN_NODES,
    "parameter.sharded_state": ON_HOST,
    "state._comm_ctx.reduce_scatter_states": _IN_TIME,
    "state._modules": WHOLE,
    "state._modules_to_run_forward": _QUICK,
    "state._state_ctx.iter_forward_root": _QUICK,
}
"""Names that training does without -> what is lost without them."""
_OF_SCALARS = {
    "group.fsdp_params",
    "parameter._contiguous_orig_stride",
    "parameter._module_info",
    "parameter._orig_size",
    "parameter._sharded_param_data",
    "parameter._sharding_spec",
    "parameter.contiguous_sharded_stride",
    "parameter.sharded_param",
    "parameter.sharded_size",
}
"""Names needed before `check_units` runs, for parameters without dimensions."""


def check_torch() -> None:
    """Raises `ConfigurationError` where classes of this torch lack a name that training needs."""
    refuse(name for name in _lacking((), ()) if name not in _DISPENSABLE)


def check_units(root: nn.Module) -> None:
    """Checks the objects that ``fully_shard`` has made of a module; call it on all ranks.

    Rank 0 warns of names in `_DISPENSABLE` that are missing.

    Raises:
        ConfigurationError: they lack a name that training needs, or a unit has several groups of parameters.
    """
    states = states_in(root)
    groups = [group for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    if any(len(getattr(state, "_fsdp_param_groups", ())) > 1 for state in states):
        raise ConfigurationError(
            f"Expected fully_shard to gather all parameters of a unit together, but in torch {torch.__version__}"
            f" {len(states)} units have {len(groups)} groups of parameters. Install torch {_TRIED}."
        )
    missing = _lacking(states, groups)
    refuse(name for name in missing if name not in _DISPENSABLE)
    told = f"OSDP: torch {torch.__version__} was not tried ({_TRIED} were)" if version() > (2, 15) else ""
    if missing:
        without = dict.fromkeys(_DISPENSABLE[name] for name in missing)
        told = f"OSDP: torch {torch.__version__} lacks {', '.join(missing)}: there is not {'; nor '.join(without)}"
    if told and dist.get_rank() == 0:
        warnings.warn(f"{told}. Training goes on.", stacklevel=2)


def version() -> tuple[int, ...]:
    """Major and minor version of torch."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


def _lacking(states: Sequence[Any], groups: Sequence[Any]) -> list[str]:
    """Names that this room uses of classes and of these objects, and that are not there."""
    classes = [(kind.__name__, name, kind) for kind, names in _METHODS.items() for name in names]
    parameters = [parameter for group in groups for parameter in getattr(group, "fsdp_params", ())]
    objects = {"state": states, "group": groups, "parameter": parameters}
    used = [(kind, path, each) for kind, holders in objects.items() for path in _ATTRIBUTES[kind] for each in holders]
    return list(dict.fromkeys(f"{kind}.{path}" for kind, path, each in (*classes, *used) if not _has(each, path)))


def _has(holder: Any, path: str) -> bool:
    first, _, inner = path.partition(".")
    return hasattr(holder, first) and (not inner or _has(getattr(holder, first), inner))


def require(use: str, states: Sequence[Any] = (), groups: Sequence[Any] = ()) -> None:
    """Raises `ConfigurationError` where torch lacks a name that this use, a value of `_DISPENSABLE`, needs."""
    refuse((name for name in _lacking(states, groups) if _DISPENSABLE.get(name) == use), f", for {use}")


def check_scalars(module: nn.Module) -> None:
    """Raises `ConfigurationError` where torch lacks a name that a unit needs for parameters without dimensions."""
    refuse(name for name in _lacking([state_of(module)], ()) if name == "state._fsdp_param_groups")
    refuse(name for name in _lacking((), [group_of(module)]) if name in _OF_SCALARS)


def refuse(missing: Iterable[str], use: str = "") -> None:
    """Raises `ConfigurationError` where anything is missing of this torch, for a use of it where one is named."""
    if names := ", ".join(missing):
        raise ConfigurationError(
            f"Expected a torch whose fully_shard is built as that of {_TRIED}{use}, got {torch.__version__} without"
            f" {names}. Install torch {_TRIED}."
        )


def state_of(module: Any) -> Any:
    """State of a unit, given any of its modules, also within `sharding.without_fully_shard`."""
    state = _get_module_state(module)
    assert isinstance(state, FSDPState)
    return state


def states_in(module: nn.Module) -> list[Any]:
    """States of all units inside a module."""
    return list(dict.fromkeys(state_of(child) for child in module.modules() if isinstance(child, FSDPModule)))


def group_of(module: Any) -> Any:
    """Group of the parameters of a unit, all of which are gathered together; None where it has none."""
    groups = state_of(module)._fsdp_param_groups
    return groups[0] if groups else None


def set_owner(root: nn.Module, owner: object) -> None:
    """Stores in the state of a root which object drives it."""
    state_of(root).lightning_osdp_owner = owner


def owner_of(root: nn.Module) -> Any:
    """Object that `set_owner` stored; None where there is none."""
    return getattr(state_of(root), "lightning_osdp_owner", None) if isinstance(root, FSDPModule) else None


def begin(root: nn.Module) -> None:
    """Makes a module the root of the units inside it, whichever of them is called first."""
    state_of(root)._lazy_init()


def do_nothing(*_: object, **__: object) -> None:
    """Stands in for a hook or a method that is not to run."""


def parameters_of(group: Any) -> list[tuple[Any, Any]]:
    """Pairs of a DTensor and its ``FSDPParam``, one for each parameter of a group."""
    return [(parameter.sharded_param, parameter) for parameter in group.fsdp_params]


def name_of(parameter: Any) -> str:
    """Qualified name, in the root, of the parameter of an ``FSDPParam``."""
    name: str = parameter._param_fqn
    return name


def rows_of(parameter: Any) -> torch.Tensor:
    """Rows that this rank has of an ``FSDPParam``."""
    rows: torch.Tensor = parameter._sharded_local_tensor
    return rows
