"""Objects that torch's ``fully_shard`` makes of a unit, and checks that this torch has all that is used of them.

Seen in torch 2.13 to 2.15. `check_torch` and `check_units` refuse a torch that lacks a name, unless it is in
`_DISPENSABLE`: those are done without.
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

from lightning_osdp.apply.internals.dtensors import hash_of
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
        "_lazy_init",
        "_pre_forward",
        "_post_forward",
        "_pre_backward",
        "_register_pre_backward_hook",
        "_register_root_post_backward_final_callback",
        "_root_post_backward_final_callback",
    ),
    FSDPParamGroup: (
        "_register_post_backward_hook",
        "_to_sharded",
        "_to_sharded_post_forward",
        "is_unsharded",
        "post_backward",
        "post_forward",
        "reshard",
        "wait_for_unshard",
    ),
    FSDPParam: (
        "_init_sharded_post_forward_param_metadata",
        "_get_grad_inner_tensor",
        "_setattr_on_modules",
        "init_unsharded_param",
        "reset_sharded_param",
        "_sharded_local_tensor",
        "to_sharded_dtensor",
        "to_sharded_post_forward_dtensor",
    ),
    TrainingState: ("FORWARD", "PRE_BACKWARD", "POST_BACKWARD", "IDLE"),
}
"""What this room uses of classes."""
_ATTRIBUTES = {
    "state": (
        "_fsdp_param_groups",
        "_modules",
        "_pre_forward_hook_handle",
        "_post_forward_hook_handle",
        "_states_to_forward_prefetch",
        "_comm_ctx.all_gather_copy_in_stream",
        "_comm_ctx.all_gather_state",
        "_comm_ctx.all_gather_stream",
        "_comm_ctx.device_handle",
        "_comm_ctx.post_forward_order",
        "_state_ctx.all_states",
        "_state_ctx.post_backward_final_callback_queued",
        "_training_state",
    ),
    "group": (
        "_all_gather_result",
        "_module_to_pre_load_state_dict_hook_handle",
        "_module_to_pre_save_state_dict_hook_handle",
        "_partial_reduce_output",
        "_post_forward_indices",
        "_reshard_after_forward_event",
        "_training_state",
        "comm_ctx",
        "device_handle",
        "fsdp_params",
        "mesh_info.shard_mesh_rank",
        "mesh_info.shard_mesh_size",
        "mesh_info.shard_process_group",
        "modules",
        "post_forward_mesh_info",
        "reduce_grads",
        "reduce_scatter_unused_params",
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
        "orig_dtype",
        "post_forward_mesh_info",
        "reduce_dtype",
        "sharded_param",
        "sharded_size",
        "unsharded_accumulated_grad",
    ),
}
"""What it uses of the objects that make a unit; `_unsharded_param` of a parameter comes with its first all-gather."""
IN_NODES = "a mode that leaves a shard in each node"
_AHEAD = "asynchronous_unshard, so that steps may take longer than predicted"
_ONCE = "that a tensor given to a unit twice arrives as one"
WHOLE = "gathered(), and a fit of a model that was evaluated first"
_DISPENSABLE = {
    "FSDPModule._orig_cls_mro_index": WHOLE,
    "FSDPModule._set_unshard_async_op": _AHEAD,
    "FSDPParam._init_sharded_post_forward_param_metadata": IN_NODES,
    "FSDPParamGroup._register_post_backward_hook": _ONCE,
    "FSDPParamGroup._to_sharded_post_forward": IN_NODES,
    "group._module_to_pre_load_state_dict_hook_handle": WHOLE,
    "group._module_to_pre_save_state_dict_hook_handle": WHOLE,
    "group.post_forward_mesh_info": IN_NODES,
    "parameter._post_load_hook_handle": WHOLE,
    "parameter.post_forward_mesh_info": IN_NODES,
    "state._modules": WHOLE,
    "state._post_forward_hook_handle": WHOLE,
    "state._pre_forward_hook_handle": WHOLE,
}
"""What trains without it, by name: what there is not then."""
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
"""What is needed before units are checked, where a model has parameters without dimensions."""


def check_torch() -> None:
    """Raises `ConfigurationError` where the classes of this torch lack something that training needs."""
    _refuse(name for name in _lacking((), ()) if name not in _DISPENSABLE)


def check_units(root: nn.Module) -> None:
    """The same of the objects that ``fully_shard`` has made of a module; rank 0 warns of what there is not."""
    states = list(dict.fromkeys(state_of(child) for child in root.modules() if isinstance(child, FSDPModule)))
    groups = [group for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    if any(len(getattr(state, "_fsdp_param_groups", ())) > 1 for state in states):
        raise ConfigurationError(
            f"Expected fully_shard to gather all parameters of a unit together, but in torch {torch.__version__}"
            f" {len(states)} units have {len(groups)} groups of parameters. Install torch {_TRIED}."
        )
    missing = _lacking(states, groups)
    _refuse(name for name in missing if name not in _DISPENSABLE)
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
    used = [(kind, path, each) for kind, found in objects.items() for path in _ATTRIBUTES[kind] for each in found]
    return list(dict.fromkeys(f"{kind}.{path}" for kind, path, each in (*classes, *used) if not _has(each, path)))


def _has(found: Any, path: str) -> bool:
    first, _, inner = path.partition(".")
    return hasattr(found, first) and (not inner or _has(getattr(found, first), inner))


def require(what: str, states: Sequence[Any] = (), groups: Sequence[Any] = ()) -> None:
    """Raises `ConfigurationError` where torch lacks something that one of the values of `_DISPENSABLE` needs."""
    _refuse((name for name in _lacking(states, groups) if _DISPENSABLE.get(name) == what), f", for {what}")


def check_scalars(module: nn.Module) -> None:
    """Raises `ConfigurationError` where torch lacks something that a unit with a parameter without dimensions needs."""
    _refuse(name for name in _lacking([state_of(module)], ()) if name == "state._fsdp_param_groups")
    _refuse(name for name in _lacking((), [group_of(module)]) if name in _OF_SCALARS)


def _refuse(missing: Iterable[str], use: str = "") -> None:
    if names := ", ".join(missing):
        raise ConfigurationError(
            f"Expected a torch whose fully_shard is built as that of {_TRIED}{use}, got {torch.__version__} without"
            f" {names}. Install torch {_TRIED}."
        )


def state_of(module: Any) -> Any:
    """The state of a unit, given any of its modules, also while it is a `plain` one."""
    state = _get_module_state(module)
    assert isinstance(state, FSDPState)
    return state


def group_of(module: Any) -> Any:
    """The parameters that a unit gathers together; None where it has none."""
    groups = state_of(module)._fsdp_param_groups
    return groups[0] if groups else None


def set_owner(root: nn.Module, owner: object) -> None:
    """Has the state of a root lead to what drives it."""
    state_of(root).lightning_osdp_owner = owner


def owner_of(root: nn.Module) -> Any:
    """What `set_owner` gave; None where there is nothing."""
    return getattr(state_of(root), "lightning_osdp_owner", None) if isinstance(root, FSDPModule) else None


def begin(root: nn.Module) -> None:
    """Makes this module the root of the units inside it, whichever of them forward is going to call first."""
    state_of(root)._lazy_init()


def do_nothing(*_: object, **__: object) -> None:
    """In place of a hook, or of a method that is not to run."""


def parameters_of(group: Any) -> list[tuple[nn.Parameter, Any]]:
    """The DTensors of a unit, each with what ``fully_shard`` knows of it."""
    return [(parameter.sharded_param, parameter) for parameter in group.fsdp_params]


def name_of(parameter: Any) -> str:
    """The name in the root of one of `parameters_of`."""
    name: str = parameter._param_fqn
    return name


def hash_of_rows(parameter: Any) -> int:
    """`hash_of` this rank's rows of one of `parameters_of`."""
    return hash_of(parameter._sharded_local_tensor)
