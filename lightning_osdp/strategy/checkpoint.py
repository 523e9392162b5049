"""Saving and loading a wrapped model as Lightning's FSDP strategy does, on CPU too.

Lightning's own helpers gather with ``offload_to_cpu=True``, which reads freed memory on CPU (pytorch/pytorch#188989).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_load, _is_sharded_checkpoint
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from lightning_osdp.apply import full_state, load_state, named_state, numbered, sharded_state
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.splitting import sharded_like
from lightning_osdp.strategy.loading import copied, fitting, read_saved


def model_state(root: nn.Module, state_dict_type: str) -> dict[str, Any]:
    """State dict under the unwrapped names: whole tensors on rank 0 ("full"), or each rank's shards ("sharded")."""
    with sharded_state(root) if state_dict_type == "sharded" else full_state(root, rank0_only=True):
        return root.state_dict()


def whole_state(root: nn.Module, *, on_all_ranks: bool) -> dict[str, Any] | None:
    """Whole state dict in memory of its own, on rank 0 or on all ranks; None on the others. All ranks must call it."""
    with full_state(root, rank0_only=not on_all_ranks):
        state = root.state_dict()
    if dist.get_rank() != 0 and not on_all_ranks:
        return None
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def optimizer_state(root: nn.Module, optimizer: Any, state_dict_type: str) -> dict[str, Any]:
    """State of one optimizer, likewise; whole states are keyed by parameter index, as a plain optimizer's are."""
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer._optimizer
    if state_dict_type == "sharded":
        with sharded_state(root):
            return named_state(root, optimizer)
    with full_state(root, rank0_only=True):
        state = named_state(root, optimizer)
    return numbered(state) if dist.get_rank() == 0 else state


def load(
    path: Path,
    root: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
    keeps_weights: bool = False,
) -> dict[str, Any]:
    """Loads model and optimizers from a full or sharded checkpoint; returns the rest of it.

    Args:
        path: a file (full) or a folder (sharded).
        root: the wrapped model.
        optimizers: those to load; empty to leave optimizer state alone.
        strict: whether every parameter must be in the checkpoint.
        weights_only: passed to ``torch.load``.
        keeps_weights: whether to return the whole weights of a full checkpoint, too.

    Raises:
        ConfigurationError: the path is neither, or the checkpoint cannot be read, or is of another model.
    """
    if _is_sharded_checkpoint(path):
        return _load_sharded(path, root, optimizers, strict=strict, weights_only=weights_only)
    if path.is_file():
        return _load_full(path, root, optimizers, strict=strict, weights_only=weights_only, keeps_weights=keeps_weights)
    raise ConfigurationError(
        f"Expected a checkpoint at {str(path)!r}: a file with the full state, or a folder with shards written by this"
        " strategy. Found neither."
    )


def _load_sharded(
    path: Path,
    root: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    with sharded_state(root):
        state = {"model": root.state_dict()}
        with fitting(path):
            _distributed_checkpoint_load(state, path)
        root.load_state_dict(state["model"], strict=strict)
        stored = FileSystemReader(path).read_metadata()
        num_stored = len({place[0] for place in stored.planner_data.values()} - {"model"})
        if num_stored and optimizers:
            _check_number(num_stored, len(optimizers))
            for index, optimizer in enumerate(optimizers):
                load_state(root, optimizer, _read_sharded(path, stored, f"optimizer_{index}", state["model"]))
    return copied(read_saved(path / _METADATA_FILENAME, weights_only=weights_only))


def _check_number(num_stored: int, num_optimizers: int) -> None:
    if num_stored != num_optimizers:
        raise RuntimeError(
            f"Expected a checkpoint with the state of {num_optimizers} optimizers, as configured, got {num_stored}."
            " Configure as many as were saved, or load the weights alone."
        )


def _read_sharded(path: Path, metadata: Metadata, optimizer: str, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """State of an optimizer by name, sharded as the parameters are."""
    places = metadata.planner_data
    entries: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if places[key][0] != optimizer:
            continue
        if isinstance(stored, TensorStorageMetadata):
            entries[key] = _empty(stored, parameters.get(places[key][2]) if len(places[key]) > 2 else None)
        else:
            entries[key] = "read in its place"
    _distributed_checkpoint_load(entries, path)
    state: dict[str, Any] = unflatten_state_dict(entries, places)[optimizer]
    return state


def _empty(stored: TensorStorageMetadata, parameter: Tensor | None) -> Tensor:
    """Memory to read an entry into: shards like the parameter's, or all of what has another shape."""
    dtype = stored.properties.dtype
    if not isinstance(parameter, ShardedTensor) or parameter.shape != stored.size:
        return torch.empty(stored.size, dtype=dtype)
    local = [Shard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata) for shard in parameter.local_shards()]
    return sharded_like(parameter, local, parameter.metadata().shards_metadata, stored.size, dtype)


def _load_full(
    path: Path,
    root: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
    keeps_weights: bool,
) -> dict[str, Any]:
    checkpoint = read_saved(path, weights_only=weights_only)
    if "state_dict" not in checkpoint:
        raise ConfigurationError(
            f"Expected a checkpoint of the Trainer at {str(path)!r}, with weights under 'state_dict', got one without."
            " To load bare weights, call load_state_dict of the LightningModule before fit."
        )
    with full_state(root, rank0_only=False):
        weights = checkpoint["state_dict"] if keeps_weights else checkpoint.pop("state_dict")
        with fitting(path):
            root.load_state_dict(weights, strict=strict)
        checkpoint = copied(checkpoint)
        states = checkpoint.get("optimizer_states")
        if states is None or not optimizers:
            return checkpoint
        _check_number(len(states), len(optimizers))
        for optimizer, state in zip(optimizers, states, strict=True):
            load_state(root, optimizer, state)
    return checkpoint
