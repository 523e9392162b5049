"""Shards in memory of the host, of which each all-gather takes a copy on the device, and their gradients there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from lightning_osdp.apply.internals import access, dtensors

_ON_HOST = "lightning_osdp_on_host"
"""Attribute of groups: there if their shards are on the host."""
_AHEAD = "lightning_osdp_copied_ahead"
"""Attribute of parameters: a copy of their shard for the next all-gather."""
_COPIED = "lightning_osdp_copied"
"""Attribute of parameters: the event that marks the end of the latest copy of their shard, on CUDA."""
_CAST = "lightning_osdp_cast"
"""Attribute of parameters: their shard in the dtype that is gathered, and the mark of the shard when it was cast."""


def policy(device: torch.device) -> CPUOffloadPolicy:
    """Policy with which ``fully_shard`` puts shards of a unit on the host, in pinned memory where that is of use."""
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def keep(module: nn.Module) -> None:
    """Has all-gathers of a unit take copies of its shard, which ``fully_shard`` has put on the host.

    Copies are in the dtype that is gathered: where shards have another one, the host keeps them in both.

    One rank gathers nothing. There the shard is copied where an all-gather would begin, in the stream of what
    all-gathers send, and so beside what is computed until the unit is needed.

    On CPU, memory of the host is that of the device: shards and gradients are copied all the same, and callers see to
    it that nobody counts them as the device's. [Frozen ones ran on one GPU by `benchmarks/gpu_check.py`, trained on
    CPU alone.]
    """
    group = access.group_of(module)
    if group is None:
        return
    access.require(access.ON_HOST, groups=[group])
    setattr(group, _ON_HOST, True)
    for parameter in group.fsdp_params:
        kind: Any = type(parameter)
        parameter.__class__ = _kind(kind)
    if group.mesh_info.shard_mesh_size == 1:
        group.unshard = partial(_unshard, group, group.unshard)


def _unshard(group: Any, unshard: Callable[..., None], async_op: bool = False) -> None:
    was_begun = group._all_gather_result is not None
    unshard(async_op)
    if group._all_gather_result is None or was_begun:
        return
    with group.device_handle.stream(group.comm_ctx.all_gather_copy_in_stream):
        for parameter in group.fsdp_params:
            parameter.copy_ahead()


def kept(groups: Sequence[Any]) -> list[Any]:
    """Parameters, as ``fully_shard`` has them, whose shards are on the host."""
    return [each for group in groups for each in group.fsdp_params if is_kept(each)]


def is_kept(parameter: Any) -> bool:
    """True if the shard of an ``FSDPParam`` is on the host."""
    return isinstance(parameter, _OnHost)


def tensors_of(parameter: Any) -> Iterator[Tensor]:
    """Yields what an ``FSDPParam`` has in memory of the host, if its shard is there."""
    yield dtensors.local(parameter.sharded_param)
    if parameter.sharded_param.grad is not None:
        yield dtensors.local(parameter.sharded_param.grad)
    if _CAST in vars(parameter):
        yield vars(parameter)[_CAST][0]


def copies_gradients(group: Any) -> bool:
    """True if gradients of a unit are to be copied to memory of the host here: torch does so where that is another."""
    return (
        hasattr(group, _ON_HOST)
        and group.device.type == "cpu"
        and any(not getattr(each.sharded_param, "_post_accumulate_grad_hooks", None) for each in group.fsdp_params)
    )


@torch.no_grad()
def add_gradients(gradients: Iterable[tuple[Tensor, DTensor]], *, is_kept: bool) -> None:
    """Sets gradients of shards, or adds to them; those of shards on the host there, unseen by modes that count."""
    with _disable_current_modes() if is_kept else nullcontext():
        for shard, gradient in gradients:
            if shard.grad is not None:
                dtensors.local(shard.grad).add_(gradient._local_tensor)
                continue
            if is_kept:
                gradient._local_tensor = gradient._local_tensor.clone()
            shard.grad = gradient


def wait_for_copies(parameters: Iterable[Any]) -> None:
    """Returns when shards are copied as far as all-gathers were issued, so that anybody may write to them."""
    for parameter in parameters:
        event = vars(parameter).pop(_COPIED, None)
        if event is not None:
            event.synchronize()


def forget_copies(group: Any) -> None:
    """Drops copies that were made ahead for an all-gather that nobody waits for."""
    for parameter in group.fsdp_params:
        vars(parameter).pop(_AHEAD, None)


class _OnHost(FSDPParam):
    """Parameter whose shard is on the host."""

    @property
    def _is_plain(self) -> bool:
        return not hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")

    def copy_ahead(self) -> None:
        """Copies the shard for the all-gather that comes next, which takes its own copy if tensors have their way."""
        if self._is_plain:
            vars(self)[_AHEAD] = self._copy()

    def _copy(self) -> Tensor:
        copied = self._sent().to(self.device, non_blocking=True, copy=True)
        if self.device.type == "cuda":
            vars(self)[_COPIED] = torch.cuda.current_stream(self.device).record_event()
        return copied

    def _sent(self) -> Tensor:
        """Shard in the dtype that is gathered: cast anew once somebody may have written to it."""
        shard: Tensor = self._sharded_param_data
        if self.param_dtype is None:
            return shard
        cast: Tensor | None
        cast, known = vars(self).get(_CAST, (None, None))
        mark = dtensors.mark_of(self.sharded_param)
        if cast is None or known != mark:
            # unseen by modes that count for the device
            with torch.inference_mode(mode=False), torch.no_grad(), _disable_current_modes():
                if cast is None or cast.shape != shard.shape:
                    pins = self.device.type == "cuda"
                    cast = torch.empty_like(shard, dtype=self.param_dtype, pin_memory=pins)
                wait_for_copies([self])
                cast.copy_(shard)
            vars(self)[_CAST] = cast, mark
        return cast

    @property
    @override
    def all_gather_inputs(self) -> list[Tensor]:
        if self.sharded_state != ShardedState.SHARDED or not self._is_plain:
            inputs: list[Tensor] = super().all_gather_inputs
            return inputs
        copied = vars(self).pop(_AHEAD, None)
        if copied is None:
            copied = self._copy()
        elif (event := vars(self).get(_COPIED)) is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            copied.record_stream(stream)  # its memory is that of the stream of copies, where the next one is made
        return [copied]


@lru_cache
def _kind(kind: type[FSDPParam]) -> type[FSDPParam]:
    """Class of parameters of this class whose shards are on the host."""
    return type(_OnHost.__name__, (_OnHost, kind), {})
