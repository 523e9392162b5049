"""State dicts of a wrapped model under the unwrapped model's names, whole or sharded."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)


def full_state(root: nn.Module, *, rank0_only: bool) -> AbstractContextManager[object]:
    """Within it, ``state_dict`` and ``FSDP.optim_state_dict`` give whole tensors, on rank 0 or on all ranks."""
    offload = _offloads(root)
    return FullyShardedDataParallel.state_dict_type(
        root,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only),
        FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only),
    )


def sharded_state(root: nn.Module) -> AbstractContextManager[object]:
    """Within it, ``state_dict`` and ``FSDP.optim_state_dict`` give each rank its shards."""
    offload = _offloads(root)
    return FullyShardedDataParallel.state_dict_type(
        root,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=offload),
        ShardedOptimStateDictConfig(offload_to_cpu=offload),
    )


def _offloads(root: nn.Module) -> bool:
    """Whether to copy gathered tensors to the host: on CPU that reads freed memory (pytorch/pytorch#188989)."""
    device = FullyShardedDataParallel.fsdp_modules(root)[0].compute_device
    assert device is not None
    return device.type != "cpu"
