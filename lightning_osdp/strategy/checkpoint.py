"""Saving and loading a wrapped model as Lightning's FSDP strategy does, on CPU too.

Lightning's own helpers gather with ``offload_to_cpu=True``, which reads freed memory on CPU (pytorch/pytorch#188989).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_load, _is_sharded_checkpoint
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.apply import (
    check_number,
    full_state,
    load_state,
    named_state,
    numbered,
    read_optimizers,
    sharded_state,
)
from lightning_osdp.errors import ConfigurationError
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
        states = read_optimizers(path, len(optimizers), state["model"])
        for optimizer, saved in zip(optimizers, states, strict=False):  # without state none is stored
            load_state(root, optimizer, saved)
    return copied(read_saved(path / _METADATA_FILENAME, weights_only=weights_only))


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
        check_number(len(states), len(optimizers))
        for optimizer, state in zip(optimizers, states, strict=True):
            load_state(root, optimizer, state)
    return checkpoint
