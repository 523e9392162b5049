"""Loading a checkpoint, full or sharded, into a sharded model as Lightning's FSDP strategy does, on CPU too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint
from lightning.fabric.utilities.load import _METADATA_FILENAME
from torch.optim import Optimizer

from lightning_osdp.apply import ShardedModel, check_number
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.checkpointing.read import copied, fitting, read_saved


def load(
    path: Path,
    sharded: ShardedModel,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    weights_only: bool | None,
    keeps_weights: bool = False,
    begin_optimizers: Callable[[Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Loads model and optimizers from a full or sharded checkpoint; returns the rest of it.

    Args:
        path: a file (full) or a folder (sharded).
        sharded: the model.
        optimizers: those to load; empty to leave optimizer state alone.
        strict: whether every parameter must be in the checkpoint.
        weights_only: passed to ``torch.load``.
        keeps_weights: whether to return the whole weights of a full checkpoint, too.
        begin_optimizers: called before states of optimizers are loaded, with the checkpoint without weights and states
            where these are sharded.

    Raises:
        ConfigurationError: the path is neither, or the checkpoint cannot be read, or is of another model.
    """
    if _is_sharded_checkpoint(path):
        metadata = read_saved(path / _METADATA_FILENAME, weights_only=weights_only)
        if optimizers and begin_optimizers is not None:
            begin_optimizers(metadata)
        with fitting(path):
            sharded.load_sharded(path, optimizers, strict=strict)
        return copied(metadata)
    if path.is_file():
        checkpoint = read_saved(path, weights_only=weights_only)
        if optimizers and begin_optimizers is not None:
            begin_optimizers(checkpoint)
        return _load_full(path, checkpoint, sharded, optimizers, strict=strict, keeps_weights=keeps_weights)
    raise ConfigurationError(
        f"Expected a checkpoint at {str(path)!r}: a file with the full state, or a folder with shards written by this"
        " strategy. Found neither."
    )


def _load_full(
    path: Path,
    checkpoint: dict[str, Any],
    sharded: ShardedModel,
    optimizers: Sequence[Optimizer],
    *,
    strict: bool,
    keeps_weights: bool,
) -> dict[str, Any]:
    if "state_dict" not in checkpoint:
        raise ConfigurationError(
            f"Expected a checkpoint of the Trainer at {str(path)!r}, with weights under 'state_dict', got one without."
            " To load bare weights, call load_state_dict of the LightningModule before fit."
        )
    weights = checkpoint["state_dict"] if keeps_weights else checkpoint.pop("state_dict")
    with fitting(path):
        sharded.load_model(weights, strict=strict)
    states = checkpoint.get("optimizer_states")
    if states is not None and optimizers:
        check_number(len(states), len(optimizers))
        for optimizer, state in zip(optimizers, states, strict=True):
            sharded.load_optimizer(optimizer, state)
    # Each rank has taken its part of these; whole they stay in the file.
    in_file = {} if states is None else {"optimizer_states": checkpoint.pop("optimizer_states")}
    return {**copied(checkpoint), **in_file}
