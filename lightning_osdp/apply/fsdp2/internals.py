"""Everything of torch's ``fully_shard`` that is used and not public: this file, and no other.

Seen in torch 2.13; `check_torch` says clearly what a torch of another version lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from lightning_osdp.errors import ConfigurationError

_METHODS = {
    FSDPModule: ("_get_fsdp_state", "_set_unshard_async_op", "reset_iter_state"),
    FSDPState: (
        "_lazy_init",
        "_pre_forward",
        "_post_forward",
        "_reset_iter_state",
        "_root_post_backward_final_callback",
    ),
    FSDPParamGroup: ("_to_sharded", "unshard", "wait_for_unshard", "post_backward"),
    FSDPParam: ("_setattr_on_modules", "init_unsharded_param", "to_sharded_dtensor"),
}
"""What this file and torch's own code call of one another."""


def check_torch() -> None:
    """Returns if this torch has all that this file uses of it.

    Raises:
        ConfigurationError: something is missing.
    """
    used = [(kind, name) for kind, names in _METHODS.items() for name in names]
    missing = [f"{kind.__name__}.{name}" for kind, name in used if not hasattr(kind, name)]
    if missing:
        raise ConfigurationError(
            f"Expected a torch whose fully_shard is built as that of 2.13, got {torch.__version__} without"
            f" {', '.join(missing)}. Install torch 2.13, or use engine='fsdp1'."
        )


def read_whole_values() -> None:
    """Has ``item()`` and ``float()`` of a DTensor give the value over all ranks, which must all call it.

    torch gives this rank's part of it, so that ``float(parameter.grad.norm())`` is the norm of the shard.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(torch.ops.aten._local_scalar_dense.default, _whole_value)


def _whole_value(operation: Any, args: Any, _: Any) -> Any:
    (tensor,) = args
    return operation(tensor.full_tensor())


def state_of(module: nn.Module) -> Any:
    """The state of a unit, given any of its modules."""
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def group_of(module: nn.Module) -> Any:
    """The parameters that a unit gathers together; None where it has none."""
    groups = state_of(module)._fsdp_param_groups
    return groups[0] if groups else None


def begin(root: nn.Module) -> None:
    """Makes this module the root of the units inside it, whichever of them forward is going to call first."""
    state_of(root)._lazy_init()


def set_asynchronous(root: nn.Module, *, is_asynchronous: bool) -> None:
    """Whether all-gathers are waited for where they are needed, and not where they are issued."""
    assert isinstance(root, FSDPModule)
    root._set_unshard_async_op(is_asynchronous)


def run_as_forward(root: nn.Module, step: Callable[..., Any], args: Any, kwargs: Any, own: Callable[[Any], Any]) -> Any:
    """Runs a step as if it were the forward of the root; ``own`` is applied to what it returns."""
    state = state_of(root)
    args, kwargs = state._pre_forward(root, args, kwargs)
    return state._post_forward(root, args, own(step(*args, **kwargs)))


def reshard(root: nn.Module, groups: Sequence[Any]) -> None:
    """Frees what is unsharded, and what an all-gather has left that nobody waited for; gradients stay.

    A pending all-gather would be copied out by the next forward, with the values of its time.
    """
    context = state_of(root)._comm_ctx
    context.all_gather_state = None
    for group in groups:
        if group._all_gather_result is not None:
            _wait_for(group._all_gather_result)
            group._all_gather_result = None
        group._to_sharded()
        if group._training_state != TrainingState.FORWARD:  # else the order is that of a forward that goes on
            group._post_forward_indices.clear()
    context.post_forward_order.clear()


def _wait_for(result: Any) -> None:
    if result.all_gather_event is not None:
        torch.accelerator.current_stream().wait_event(result.all_gather_event)
    if isinstance(result.all_gather_work, dist.Work):
        result.all_gather_work.wait()


def forget_step(root: nn.Module, groups: Sequence[Any]) -> None:
    """Gives up whatever a step was in the middle of, whole gradients included."""
    state_of(root)._reset_iter_state()
    for group in groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def reduce_what_is_left(root: nn.Module, groups: Sequence[Any]) -> None:
    """Has the end of a backward reduce gradients that came to a unit after backward was through with it.

    They do where a module is called twice, once of it under a reentrant checkpoint: that one's backward runs by itself,
    and torch would leave its gradients to the next step.
    """

    def ending(end: Callable[[], None]) -> Callable[[], None]:
        def ended() -> None:
            for group in groups:
                is_through = group.reduce_grads and group._training_state == TrainingState.POST_BACKWARD
                if is_through and any(has_whole_gradient(parameter) for parameter in group.fsdp_params):
                    group._training_state = TrainingState.PRE_BACKWARD  # torch then takes it for one that is left
            end()

        return ended

    for state in dict.fromkeys(state_of(module) for module in root.modules() if isinstance(module, FSDPModule)):
        state._root_post_backward_final_callback = ending(state._root_post_backward_final_callback)


def on_post_backward(group: Any, note: Callable[[list[bool]], None]) -> None:
    """Calls ``note`` whenever backward is through with a unit: for each parameter, whether it got a gradient."""
    post_backward = group.post_backward

    def noted(*unused: Any) -> None:
        note([has_whole_gradient(parameter) for parameter in group.fsdp_params])
        post_backward(*unused)

    group.post_backward = noted


def on_collectives(group: Any, note: Callable[[bool], None]) -> None:
    """Calls ``note`` before each all-gather (False) and reduce-scatter (True) of a unit."""
    group._all_gather_comm = NotedAllGather(partial(note, False))
    group._reduce_scatter_comm = NotedReduceScatter(partial(note, True))


def has_whole_gradient(parameter: Any) -> bool:
    """Whether one of `parameters_of` has a gradient that is not reduced yet."""
    if parameter.unsharded_accumulated_grad is not None:
        return True
    return hasattr(parameter, "_unsharded_param") and parameter._unsharded_param.grad is not None


def parameters_of(group: Any) -> list[tuple[nn.Parameter, Any]]:
    """The DTensors of a unit, each with what ``fully_shard`` knows of it."""
    return [(parameter.sharded_param, parameter) for parameter in group.fsdp_params]


def sharded_zeros(group: Any) -> Iterator[tuple[nn.Parameter, DTensor]]:
    """For each trainable parameter, a gradient of zeros such as a reduce-scatter leaves."""
    for parameter in group.fsdp_params:
        if parameter.sharded_param.requires_grad:
            yield (
                parameter.sharded_param,
                parameter.to_sharded_dtensor(torch.zeros_like(parameter._sharded_local_tensor)),
            )


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def whole_storages(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that have storage only while units inside a module are unsharded."""
    for child in module.modules():
        group = group_of(child) if isinstance(child, FSDPModule) else None
        for parameter in () if group is None else group.fsdp_params:
            yield from parameter.all_gather_outputs


def use_group(group: Any, process_group: dist.ProcessGroup) -> None:
    """Runs the collectives of a unit on another process group."""
    info = group.mesh_info
    assert isinstance(info, FSDPMeshInfo)
    info.shard_process_group = process_group


def process_group_of(group: Any) -> dist.ProcessGroup:
    """What it runs them on."""
    process_group: dist.ProcessGroup = group.mesh_info.shard_process_group
    return process_group


def phase_of(group: Any) -> str:
    """``forward``, ``backward`` or nothing: what a unit is in."""
    phases = {
        TrainingState.FORWARD: "forward",
        TrainingState.PRE_BACKWARD: "backward",
    }
    return phases.get(group._training_state, "")


def is_in_backward(root: nn.Module) -> bool:
    """Whether a backward is going on."""
    return bool(state_of(root)._state_ctx.post_backward_final_callback_queued)


def keep_attributes(module: nn.Module) -> None:
    """Has ``module.to(...)`` and the like leave what is set on parameters, which torch drops of DTensors."""
    apply: Any = module._apply

    def kept(*args: Any, **kwargs: Any) -> Any:
        attributes = [(parameter, dict(vars(parameter))) for parameter in module.parameters()]
        result = apply(*args, **kwargs)
        for parameter, own in attributes:
            vars(parameter).update(own)
        return result

    module._apply = kept  # type: ignore[method-assign]  # of this module alone: its class may be that of others


def make_plain(module: nn.Module) -> None:
    """Undoes ``fully_shard`` for a module and all inside it: whole parameters, no hooks, its own class."""
    whole = {}
    states = list(dict.fromkeys(state_of(child) for child in module.modules() if isinstance(child, FSDPModule)))
    for state in states:
        for group in state._fsdp_param_groups:
            group._to_sharded()
            for parameter in group.fsdp_params:
                sharded = parameter.sharded_param
                whole[parameter] = nn.Parameter(sharded.full_tensor().detach().clone(), sharded.requires_grad)
                whole[parameter].__dict__.update(sharded.__dict__)
    for parameter, value in whole.items():
        parameter._setattr_on_modules(value)
        parameter._post_load_hook_handle.remove()
    for state in states:
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in state._fsdp_param_groups:
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for handle in handles.values():
                    handle.remove()
        for child in state._modules:
            child.__dict__.pop("_apply", None)
            child.__class__ = type(child).__mro__[type(child)._orig_cls_mro_index]
            del child.__dict__[STATE_KEY], child.__dict__[REGISTRY_KEY], _module_state_mapping[child]
    for child in module.modules():
        child.__dict__.pop("_is_fsdp_managed_module", None)
        child.__dict__.pop("_fsdp_use_orig_params", None)


class _Noted:
    """Tells of each call, before it.

    Args:
        note: called before each.
    """

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._note()
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # of what it is mixed into


class NotedAllGather(_Noted, DefaultAllGather):
    """Torch's own all-gather, which tells of each that it runs."""


class NotedReduceScatter(_Noted, DefaultReduceScatter):
    """Torch's own reduce-scatter, likewise."""
