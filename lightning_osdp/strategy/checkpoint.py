"""Saving and loading a wrapped model as Lightning's FSDP strategy does, on CPU too.

Lightning's own helpers gather with ``offload_to_cpu=True``, which reads freed memory on CPU (pytorch/pytorch#188989).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_load, _is_sharded_checkpoint
from lightning.fabric.utilities.load import _METADATA_FILENAME, _lazy_load, _materialize_tensors
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.optim import Optimizer

from lightning_osdp.apply import full_state, sharded_state


def model_state(root: FullyShardedDataParallel, state_dict_type: str) -> dict[str, Any]:
    """State dict under the unwrapped names: whole tensors on rank 0 ("full"), or each rank's shards ("sharded")."""
    with sharded_state(root) if state_dict_type == "sharded" else full_state(root, rank0_only=True):
        return root.state_dict()


def whole_state(root: FullyShardedDataParallel, *, on_all_ranks: bool) -> dict[str, Any] | None:
    """Whole state dict in memory of its own, on rank 0 or on all ranks; None on the others. All ranks must call it."""
    with full_state(root, rank0_only=not on_all_ranks):
        state = root.state_dict()
    if root.rank != 0 and not on_all_ranks:
        return None
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def optimizer_state(root: FullyShardedDataParallel, optimizer: Any, state_dict_type: str) -> dict[str, Any]:
    """State of one optimizer, likewise; whole states are keyed by parameter index, as a plain optimizer's are."""
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer._optimizer
    if state_dict_type == "sharded":
        with sharded_state(root):
            return FullyShardedDataParallel.optim_state_dict(root, optimizer)
    with full_state(root, rank0_only=True):
        state = FullyShardedDataParallel.optim_state_dict(root, optimizer)
    if root.rank == 0:
        state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, root)
    return state


def load(
    path: Path,
    root: FullyShardedDataParallel,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Loads model and optimizers from a full or sharded checkpoint; returns the rest of it.

    Args:
        path: a file (full) or a folder (sharded).
        root: the wrapped model.
        optimizers: those to load; empty to leave optimizer state alone.
        strict: whether every parameter must be in the checkpoint.
        weights_only: passed to ``torch.load`` for what is neither model nor optimizer.

    Raises:
        ValueError: the path is neither.
    """
    if _is_sharded_checkpoint(path):
        return _load_sharded(path, root, optimizers, strict=strict, weights_only=weights_only)
    if path.is_file():
        return _load_full(path, root, optimizers, strict=strict)
    raise ValueError(
        f"Expected a checkpoint at {str(path)!r}: a file with the full state, or a folder with shards written by this"
        " strategy. Found neither."
    )


def _load_sharded(
    path: Path,
    root: FullyShardedDataParallel,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    with sharded_state(root):
        state = {"model": root.state_dict()}
        _distributed_checkpoint_load(state, path)
        root.load_state_dict(state["model"], strict=strict)
        for index, optimizer in enumerate(optimizers):
            key = f"optimizer_{index}"
            loaded = load_sharded_optimizer_state_dict(
                model_state_dict=state["model"], optimizer_key=key, storage_reader=FileSystemReader(path)
            )
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                model=root, optim=optimizer, optim_state_dict=loaded[key]
            )
            optimizer.load_state_dict(flat)
    metadata: dict[str, Any] = torch.load(path / _METADATA_FILENAME, weights_only=weights_only)
    return metadata


def _load_full(
    path: Path, root: FullyShardedDataParallel, optimizers: Sequence[Optimizer], *, strict: bool
) -> dict[str, Any]:
    checkpoint: dict[str, Any] = _lazy_load(path)
    with full_state(root, rank0_only=False):
        root.load_state_dict(_materialize_tensors(checkpoint.pop("state_dict")), strict=strict)
        checkpoint = _materialize_tensors(checkpoint)
        states = checkpoint.get("optimizer_states")
        if states is None or not optimizers:
            return checkpoint
        if len(states) != len(optimizers):
            raise RuntimeError(
                f"Expected a checkpoint with the state of {len(optimizers)} optimizers, as configured, got"
                f" {len(states)}. Configure as many as were saved, or load the weights alone."
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            named = state
            if isinstance(next(iter(state["state"]), None), int):
                named = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, root)
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                model=root, optim=optimizer, optim_state_dict=named
            )
            optimizer.load_state_dict(flat)
    return checkpoint
