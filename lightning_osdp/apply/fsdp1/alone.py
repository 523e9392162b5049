"""Steps of one rank without the others: its units run on a process group whose other ranks do not exist.

A rank that fails inside a step leaves the others in a collective. Alone it can fail, and tell them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.utils import _free_storage

from lightning_osdp.apply.fsdp1.gathered import gathered_tensors


@contextmanager
def alone(root: FullyShardedDataParallel) -> Iterator[None]:
    """Within it, no collective reaches another rank: neither those of the units nor those of the default process group.

    Weights that units gather are then wrong, and so are losses and gradients; shapes and bytes are those of real steps.
    When it ends, by an error too, units are as before: sharded, without gradients, on their own process group. Shards
    are never written to. All ranks must enter it.

    Args:
        root: the wrapped model, between two steps.
    """
    _lazy_init(root, root)
    units, handles = FullyShardedDataParallel.fsdp_modules(root), _handles(root)
    for handle in handles:
        _put_to_rest(handle)
    restores = [_attributes_of(object_) for object_ in (*units, *handles, *(h.flat_param for h in handles))]
    restores.append(_attributes_of(root._exec_order_data))
    group, real = dist.new_group(backend="fake"), dist.group.WORLD
    for unit in units:
        unit.process_group = group
    for handle in handles:
        handle.process_group = group
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = real
        root._device_handle.synchronize()  # streams may still use what is freed here
        for handle in handles:
            _put_to_rest(handle)
        for restore in restores:
            restore()
        dist.destroy_process_group(group)


def _put_to_rest(handle: FlatParamHandle) -> None:
    """Shards a unit wherever in a step it is, and drops its gradients."""
    flat = handle.flat_param
    hooks = getattr(flat, "_post_backward_hook_state", None)
    if hooks is not None:
        hooks[-1].remove()
        del flat._post_backward_hook_state
    handle._training_state = HandleTrainingState.IDLE
    flat.grad = None
    handle.reshard(free_unsharded_flat_param=False)
    for gathered in gathered_tensors(handle):
        _free_storage(gathered)


def _attributes_of(object_: object) -> Callable[[], None]:
    """Returns what puts back the object's attributes and the contents of its lists."""
    attributes = vars(object_)
    kept = dict(attributes)
    lists = [(value, list(value)) for value in kept.values() if isinstance(value, list)]

    def restore() -> None:
        attributes.clear()
        attributes.update(kept)
        for value, contents in lists:
            value[:] = contents

    return restore


@contextmanager
def kept_shards(root: FullyShardedDataParallel) -> Iterator[None]:
    """Puts back this rank's shards of trainable weights when it ends, from a copy on the host; within `alone`."""
    shards = [handle.flat_param._local_shard for handle in _handles(root) if handle.flat_param.requires_grad]
    copies = [shard.to("cpu", copy=True) for shard in shards]
    try:
        yield
    finally:
        for shard, copy in zip(shards, copies, strict=True):
            shard.copy_(copy)


def shard_gradients(root: FullyShardedDataParallel) -> None:
    """Gives trainable parameters gradients of zero, such as a step leaves behind; within `alone`."""
    for handle in _handles(root):
        if handle.flat_param.requires_grad:
            handle.flat_param.grad = torch.zeros_like(handle.flat_param._local_shard)
            if handle.uses_sharded_strategy:
                handle._use_sharded_grad_views()
            else:
                handle._use_unsharded_grad_views()


def flat_parameters(root: FullyShardedDataParallel) -> list[torch.Tensor]:
    """What FSDP1 made of the parameters of each unit."""
    return [handle.flat_param for handle in _handles(root)]


def _handles(root: FullyShardedDataParallel) -> list[FlatParamHandle]:
    return [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(root) if unit._handle is not None]
