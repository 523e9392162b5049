"""Shortcuts through what torch does anew at each call of a hook of a unit, and where it is of no use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group
from torch.profiler import record_function

from lightning_osdp.apply.internals import access, host_shards
from lightning_osdp.operations.stationary.exchanges import is_in_torch_func

_WRAP_ANEW = getattr(_fsdp_common, "_dynamo_disable", None)
"""Wraps a function in another one that at each call wraps it in a third, which dynamo leaves alone."""
_IS_ANEW = None if _WRAP_ANEW is None else _WRAP_ANEW(access.do_nothing).__code__
_NO_RANGE: AbstractContextManager[Any] = nullcontext()
_OF_COPIES = ("alloc_all_gather_outputs", "init_all_gather_outputs", "param_dtype", "to_unsharded")
"""Names of a parameter without which shards are copied as torch does it."""


def take(states: Sequence[Any], groups: Sequence[Any]) -> None:
    """Has units take them; `calls.shorten` takes those of the hooks around calls of modules.

    - Hooks of backward are wrapped for dynamo once.
    - One rank, which gathers nothing, copies the shards of a unit at once, but for those on the host.
    - Ranges of time are named where there is a profiler.
    """
    for state in states:
        state._pre_backward = torch.compiler.disable(unwrapped(state._pre_backward))
    for group in groups:
        group.pre_backward = unwrapped(group.pre_backward)  # the hook above calls it
        group.post_backward = unwrapped(group.post_backward)  # `backward.BackwardWatch` wraps it for dynamo
        has_names = all(hasattr(each, name) for each in group.fsdp_params for name in _OF_COPIES)
        if has_names and group.mesh_info.shard_mesh_size == 1 and not host_shards.kept([group]):
            group.wait_for_unshard = partial(_copy_at_once, group, group.wait_for_unshard)
    if getattr(_fsdp_param_group, "record_function", None) is record_function:
        vars(_fsdp_param_group)["record_function"] = _recorded


def unwrapped(hook: Any) -> Any:
    """Hook of torch without the wrapper that makes another one for dynamo at each call; any other function as it is.

    Dynamo has to be kept from whatever calls it.
    """
    function = getattr(hook, "__func__", hook)
    if _IS_ANEW is None or getattr(function, "__code__", None) is not _IS_ANEW:
        return hook
    return function.__wrapped__ if function is hook else MethodType(function.__wrapped__, hook.__self__)


def _recorded(name: str, *args: Any) -> AbstractContextManager[Any]:
    """Names a range of time for profilers, if there is one: torch's own takes as long as a small operation."""
    return record_function(name, *args) if _profiler_enabled() else _NO_RANGE


def _copy_at_once(group: Any, wait_for_unshard: Callable[[], None]) -> None:
    """Fills unsharded parameters with the shards of one rank, all at once; torch copies one after the other."""
    parameters = group.fsdp_params
    shards = [parameter._sharded_param_data for parameter in parameters]
    is_plain = {*map(type, shards)} == {torch.Tensor} and not is_in_torch_func()
    if not (group._all_gather_result and is_plain):
        wait_for_unshard()
        return
    for parameter, shard in zip(parameters, shards, strict=True):
        dtype = parameter.param_dtype or shard.dtype
        parameter.init_all_gather_outputs([shard.numel()], [dtype], 1, group.device)
        parameter.alloc_all_gather_outputs()
    gathered = [tensor for parameter in parameters for tensor in parameter.all_gather_outputs]
    with _unsafe_preserve_version_counter(tuple(gathered)):
        torch._foreach_copy_(gathered, shards)
    for parameter in parameters:
        parameter.init_unsharded_param()
    group.fsdp_params = []
    try:
        wait_for_unshard()  # of nothing that it had to copy
    finally:
        group.fsdp_params = parameters
    for parameter in parameters:
        parameter.to_unsharded()
