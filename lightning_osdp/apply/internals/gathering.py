"""All-gathers and reduce-scatters of units: when they run, over which process groups, and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from typing_extensions import override

from lightning_osdp.apply.internals import access, host_shards
from lightning_osdp.operations.gloo import AllGather, all_gather

_IS_READ = "lightning_osdp_is_read"
"""Attribute of units that tells whether backward reads their parameters."""
_PROCESS_GROUPS = ("shard_process_group", "replicate_process_group")
"""Attributes of a unit's mesh. The second one exists where several ranks have the same shard."""


def gather_for_training(groups: Sequence[Any]) -> None:
    """Makes units that are first gathered in inference mode usable for training later.

    The first all-gather of a unit allocates the memory that all others fill. Memory allocated in inference mode may be
    filled in that mode alone.
    """
    for group in groups:
        group.wait_for_unshard = partial(outside_inference_mode, group.wait_for_unshard)


def outside_inference_mode(call: Callable[[], None]) -> None:
    """Calls a function that allocates memory of units."""
    if not torch.is_inference_mode_enabled():
        call()
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        call()


def enter_once(groups: Sequence[Any]) -> None:
    """Has the first module of a unit that is called enter the unit for all of them, until forward leaves the unit.

    Torch enters it at each module, to find that nothing is left to do; what is wrapped around goes through all
    parameters each time, which is as many times as modules for as many parameters.
    """
    for group in groups:
        if len(group.modules) > 1:
            group.pre_forward = partial(_pre_forward, group, group.pre_forward)


def _pre_forward(group: Any, pre_forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    if group.is_unsharded and group._training_state == TrainingState.FORWARD:
        return args, kwargs
    return pre_forward(module, args, kwargs)


def gather_after(context: Any) -> None:
    """Makes all-gathers wait for all work that the device was given so far.

    This work writes shards, or reads memory that is freed now. All-gathers run on streams of their own, and torch makes
    these wait for other streams only where a forward of the root begins.
    """
    current = context.device_handle.current_stream()
    for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
        stream.wait_stream(current)


def reshard_after_forward(module: Any, *, is_kept: bool, nodes: DeviceMesh | None) -> None:
    """Sets what forward leaves of a unit: all of it, one shard in each node, or nothing.

    Args:
        module: the handle of the unit.
        is_kept: leave all of it unsharded.
        nodes: the mesh (nodes, ranks of a node) where a shard is left in each node, else None.
    """
    module.set_reshard_after_forward(not is_kept, recurse=False)
    group = access.group_of(module)
    if nodes is None or is_kept or group is None:
        return
    access.require(access.IN_NODES, groups=[group])
    # An int given to fully_shard would set the same. But it cannot be changed later, and makes process groups per unit.
    group.post_forward_mesh_info = HSDPMeshInfo(nodes, shard_mesh_dim=1, replicate_mesh_dim=0)
    for parameter in group.fsdp_params:
        parameter.post_forward_mesh_info = group.post_forward_mesh_info
        parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


def gather_ahead(module: Any, following: Sequence[Any]) -> None:
    """Sets the units that a unit all-gathers ahead in forward. A second run in backward leaves out reached units."""
    access.state_of(module)._states_to_forward_prefetch = _NotReached(map(access.state_of, following))


class _NotReached(list[Any]):
    """States of units, without the units that the present backward has reached: they need no all-gather any more."""

    @override
    def __iter__(self) -> Iterator[Any]:
        return (state for state in super().__iter__() if state._training_state != TrainingState.PRE_BACKWARD)


def set_read(module: Any, *, is_read: bool) -> None:
    """Says whether backward reads a unit's parameters: where it does not, `gather_where_read` has it gather none."""
    group = access.group_of(module)
    if group is not None:
        setattr(group, _IS_READ, is_read)


def is_read(group: Any) -> bool:
    """Tells whether backward reads a unit's parameters."""
    return bool(getattr(group, _IS_READ, True))


def note_inputs(group: Any) -> None:
    """Takes a unit for one that backward reads from now on, as inputs of it need gradients."""
    setattr(group, _IS_READ, True)


def gather_where_read(groups: Sequence[Any]) -> None:
    """Has backward leave units sharded whose parameters it does not read.

    Where forward has saved them all the same, they have another version when they are freed, so that backward raises,
    and does not compute with memory that is gone. Blocks that run again gather them for that.
    """
    for group in groups:
        group.pre_backward = partial(_pre_backward, group, group.pre_backward)
        group._to_sharded = partial(_outdate, group, group._to_sharded)


def _pre_backward(group: Any, pre_backward: Callable[..., None], _: bool) -> None:
    if is_read(group) or group.is_unsharded or group._all_gather_result is not None:
        # False: nothing is gathered ahead but what lists say, for torch does not note all units that forward calls.
        pre_backward(False)
    else:
        group._training_state = TrainingState.PRE_BACKWARD


def _outdate(group: Any, free: Callable[[], None]) -> None:
    if group.is_unsharded and group._training_state == TrainingState.FORWARD and not is_read(group):
        for parameter in group.fsdp_params if torch.is_grad_enabled() else ():
            increment_version(parameter._unsharded_param)
    free()


def set_asynchronous(root: nn.Module, *, is_asynchronous: bool) -> None:
    """Sets whether all-gathers are waited for where their result is used, instead of where they are issued."""
    assert isinstance(root, FSDPModule)
    if hasattr(root, "_set_unshard_async_op"):
        root._set_unshard_async_op(is_asynchronous)


def run_as_forward(
    root: nn.Module, step: Callable[..., Any], args: Any, kwargs: Any, convert: Callable[[Any], Any]
) -> Any:
    """Runs a step as if it were the forward of the root; ``convert`` is applied to the output of the step."""
    state = access.state_of(root)
    args, kwargs = state._pre_forward(root, args, kwargs)
    return state._post_forward(root, args, convert(step(*args, **kwargs)))


def reshard(root: nn.Module, groups: Sequence[Any]) -> None:
    """Frees unsharded parameters, and results of all-gathers that nobody waited for; gradients stay.

    The next forward would copy the result of a pending all-gather out, with values from before the optimizer's step.
    """
    context = access.state_of(root)._comm_ctx
    gather_after(context)
    context.all_gather_state = None
    for group in groups:
        if (result := group._all_gather_result) is not None:
            if result.all_gather_event is not None:
                torch.accelerator.current_stream().wait_event(result.all_gather_event)
            if isinstance(result.all_gather_work, dist.Work):
                result.all_gather_work.wait()
            group._all_gather_result = None
            host_shards.forget_copies(group)
        if not group.is_sharded:
            group._to_sharded()
        drop_retained(group)
        if group._training_state != TrainingState.FORWARD:  # a forward that goes on needs its order
            group._post_forward_indices.clear()
    context.post_forward_order.clear()


def drop_retained(group: Any) -> None:
    """Frees the shard that forward left in each node; torch does so only where backward gathers the unit from it."""
    left_in_forward = getattr(group, "post_forward_mesh_info", None)
    if left_in_forward is None or left_in_forward is group.mesh_info:
        return
    for parameter in group.fsdp_params:
        if getattr(parameter, "_sharded_post_forward_param_data", None) is not None:
            parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None


def on_collectives(group: Any, note: Callable[[bool], None], begun: Callable[[], None] = access.do_nothing) -> None:
    """Calls ``note`` before each all-gather (with False) and each reduce-scatter (with True) of a unit.

    ``begun`` is called once the collective has begun, or ended where it is waited for. A unit that each rank has all of
    has none of these but an all-reduce, which counts as a reduce-scatter.
    """
    if group.mesh_info.shard_mesh_size == 1 and isinstance(group.mesh_info, HSDPMeshInfo):
        group.post_backward = partial(_reduce_between, group, group.post_backward, note, begun)
        return
    scatter = group._reduce_scatter_comm

    def gather(output_tensor: Tensor, input_tensor: Tensor, **kwargs: Any) -> Any:
        note(False)
        work = all_gather(output_tensor, input_tensor, **kwargs)
        begun()
        return work

    def reduce(**kwargs: Any) -> Any:
        note(True)
        work = scatter(**kwargs)
        begun()
        return work

    group.modules[0].set_custom_all_gather(_Collective(gather, AllGather().allocate))
    group.modules[0].set_custom_reduce_scatter(_Collective(reduce, scatter.allocate))


def _reduce_between(
    group: Any,
    post_backward: Callable[..., None],
    note: Callable[[bool], None],
    begun: Callable[[], None],
    *unused: Any,
) -> None:
    """Ends backward of a unit that each rank has all of, whose gradients are all-reduced between ranks."""
    if group.reduce_grads:
        note(True)
    post_backward(*unused)
    begun()


def whole_storages(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that have storage only while units inside a module are unsharded."""
    for child in module.modules():
        group = access.group_of(child) if isinstance(child, FSDPModule) else None
        for parameter in () if group is None else group.fsdp_params:
            yield from parameter.all_gather_outputs


@contextmanager
def on_process_groups(
    groups: Sequence[Any], replacements: Mapping[dist.ProcessGroup, dist.ProcessGroup]
) -> Iterator[None]:
    """Runs collectives of units and DTensors on other process groups, within the context.

    Args:
        groups: groups of parameters of the units.
        replacements: process group -> the one that takes its place.
    """
    kept = []
    for group in groups:
        in_forward = getattr(group, "post_forward_mesh_info", None)
        for info in {id(info): info for info in (group.mesh_info, in_forward)}.values():
            kept += [(info, name, getattr(info, name)) for name in _PROCESS_GROUPS if hasattr(info, name)]
    try:
        for info, name, process_group in kept:
            setattr(info, name, replacements[process_group])
        for process_group, replacement in replacements.items():
            _name_group(process_group, replacement)
        yield
    finally:
        for info, name, process_group in kept:
            setattr(info, name, process_group)
        for process_group in replacements:
            _name_group(process_group, process_group)


def _name_group(named: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Registers a group under the name of another: DTensors, also those of earlier models, find groups by name."""
    _unregister_process_group(named.group_name)
    _register_process_group(named.group_name, group)


class _Collective:
    """All-gather or reduce-scatter of units, with buffers allocated by a given function."""

    def __init__(self, run: Callable[..., Any], allocate: Callable[..., Tensor]) -> None:
        self._run, self.allocate = run, allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the collective."""
        return self._run(*args, **kwargs)
