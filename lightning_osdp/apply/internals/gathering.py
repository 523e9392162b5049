"""All-gathers and reduce-scatters of units: when they run, over which process groups, and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from typing_extensions import override

from lightning_osdp.apply.internals.access import IN_NODES, group_of, require, state_of

FREEING = ("_to_sharded", "_to_sharded_post_forward")
"""Methods of a unit that free what is gathered."""
_PROCESS_GROUPS = ("shard_process_group", "replicate_process_group")
"""Attributes of a unit's mesh, of which the second is there where several ranks have the same shard."""


def gather_for_training(groups: Sequence[Any]) -> None:
    """Has units that are first gathered in inference mode be gathered for training later, too.

    What torch allocates at the first all-gather is what all others fill, and inference tensors are filled in that mode
    alone.
    """
    for group in groups:
        group.wait_for_unshard = partial(_outside_inference_mode, group.wait_for_unshard)


def _outside_inference_mode(call: Callable[[], None]) -> None:
    if not torch.is_inference_mode_enabled():
        call()
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        call()


def wrap(group: Any, names: Iterable[str], around: Callable[[Any], None]) -> None:
    """Has a unit call something with its own method, wherever torch calls one of these, as far as there are such."""
    for name in names:
        if hasattr(group, name):
            setattr(group, name, partial(around, getattr(group, name)))


def gather_after(context: Any) -> None:
    """Has all-gathers wait for what the device has been given so far: to write shards, or to read what is freed now.

    They run on streams of their own, which torch has wait for others where a forward of the root begins.
    """
    current = context.device_handle.current_stream()
    for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
        stream.wait_stream(current)


def reshard_after_forward(module: Any, *, is_kept: bool, nodes: DeviceMesh | None) -> None:
    """Says what forward leaves of a unit: all, a shard in each row of the mesh (nodes, ranks of a node), or nothing."""
    module.set_reshard_after_forward(not is_kept, recurse=False)
    group = group_of(module)
    if nodes is None or is_kept or group is None:
        return
    require(IN_NODES, groups=[group])
    # As fully_shard's own int has it, which cannot be changed later, and makes process groups for each unit.
    group.post_forward_mesh_info = HSDPMeshInfo(nodes, shard_mesh_dim=1, replicate_mesh_dim=0)
    for parameter in group.fsdp_params:
        parameter.post_forward_mesh_info = group.post_forward_mesh_info
        parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


def gather_ahead(module: Any, following: Sequence[Any]) -> None:
    """Has a unit gather others when it is called; run again, in backward, none of them that backward has come to."""
    state_of(module)._states_to_forward_prefetch = _NotReached(map(state_of, following))


class _NotReached(list[Any]):
    """States of units, without those that the present backward has come to: they are gathered, or not needed again."""

    @override
    def __iter__(self) -> Iterator[Any]:
        return (state for state in super().__iter__() if state._training_state != TrainingState.PRE_BACKWARD)


def set_asynchronous(root: nn.Module, *, is_asynchronous: bool) -> None:
    """Whether all-gathers are waited for where they are needed, and not where they are issued."""
    assert isinstance(root, FSDPModule)
    if hasattr(root, "_set_unshard_async_op"):
        root._set_unshard_async_op(is_asynchronous)


def run_as_forward(root: nn.Module, step: Callable[..., Any], args: Any, kwargs: Any, own: Callable[[Any], Any]) -> Any:
    """Runs a step as if it were the forward of the root; ``own`` is applied to what it returns."""
    state = state_of(root)
    args, kwargs = state._pre_forward(root, args, kwargs)
    return state._post_forward(root, args, own(step(*args, **kwargs)))


def reshard(root: nn.Module, groups: Sequence[Any]) -> None:
    """Frees unsharded parameters, and results of all-gathers that nobody waited for; gradients stay.

    A pending all-gather would be copied out by the next forward, with the values of its time.
    """
    context = state_of(root)._comm_ctx
    gather_after(context)
    context.all_gather_state = None
    for group in groups:
        if (result := group._all_gather_result) is not None:
            if result.all_gather_event is not None:
                torch.accelerator.current_stream().wait_event(result.all_gather_event)
            if isinstance(result.all_gather_work, dist.Work):
                result.all_gather_work.wait()
            group._all_gather_result = None
        group._to_sharded()
        drop_retained(group)
        if group._training_state != TrainingState.FORWARD:  # else the order is that of a forward that goes on
            group._post_forward_indices.clear()
    context.post_forward_order.clear()


def drop_retained(group: Any) -> None:
    """Frees what forward has left of a unit in each node; torch does so only where it gathers the unit from there."""
    for parameter in group.fsdp_params:
        if getattr(parameter, "_sharded_post_forward_param_data", None) is not None:
            parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None


def on_collectives(group: Any, note: Callable[[bool], None]) -> None:
    """Calls ``note`` before each all-gather (False) and reduce-scatter (True) of a unit."""

    def gather(output_tensor: Tensor, input_tensor: Tensor, **kwargs: Any) -> Any:
        note(False)
        return dist.all_gather_single(output_tensor, input_tensor, **kwargs)

    def reduce(output_tensor: Tensor, input_tensor: Tensor, **kwargs: Any) -> Any:
        note(True)
        return dist.reduce_scatter_single(output=output_tensor, input=input_tensor, **kwargs)

    group.modules[0].set_custom_all_gather(_Collective(gather))
    group.modules[0].set_custom_reduce_scatter(_Collective(reduce))


def whole_storages(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that have storage only while units inside a module are unsharded."""
    for child in module.modules():
        group = group_of(child) if isinstance(child, FSDPModule) else None
        for parameter in () if group is None else group.fsdp_params:
            yield from parameter.all_gather_outputs


@contextmanager
def on_process_groups(groups: Sequence[Any], others: Mapping[dist.ProcessGroup, dist.ProcessGroup]) -> Iterator[None]:
    """Within it, units and DTensors run their collectives on other process groups, given by those that they run on."""
    kept = []
    for group in groups:
        in_forward = getattr(group, "post_forward_mesh_info", None)
        for info in {id(info): info for info in (group.mesh_info, in_forward)}.values():
            found = {name: getattr(info, name) for name in _PROCESS_GROUPS if hasattr(info, name)}
            kept += [(info, name, own) for name, own in found.items()]
    try:
        for info, name, own in kept:
            setattr(info, name, others[own])
        for own, other in others.items():
            _name_group(own, other)
        yield
    finally:
        for info, name, own in kept:
            setattr(info, name, own)
        for own in others:
            _name_group(own, own)


def _name_group(named: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Has a group be found by the name of one: so do DTensors, whose meshes may be those of any model before."""
    _unregister_process_group(named.group_name)
    _register_process_group(named.group_name, group)


class _Collective:
    """An all-gather or reduce-scatter of units, in memory as torch's own."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that the collective fills, or reads."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one."""
        return self._run(*args, **kwargs)
