"""Loading a checkpoint, full or sharded, of any strategy, into a sharded model; on CPU, too.

Nothing in it is executed unless that was asked for, and what does not fit is told. A run of another strategy may have
been killed while it saved under the real name.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import is_zipfile

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol, get_filesystem
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_osdp.apply import ShardedModel, check_number
from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.checkpointing.averaging import is_averaging
from lightning_osdp.strategy.checkpointing.saving import SHARD_METADATA, is_of_checkpoint, saved_at
from lightning_osdp.strategy.runtime.all_ranks import from_all_ranks, in_step

_ZIP = b"PK\x03\x04"


@contextmanager
def in_reach(path: str | Path, strategy: FSDPStrategy) -> Iterator[Path]:
    """This checkpoint, or of a remote file a copy on each node, which is gone afterwards. Call it on all ranks.

    Raises:
        ConfigurationError: it cannot be copied; on other ranks an `OSDPError`.
    """
    if _is_local_file_protocol(path):
        yield Path(path)
        return
    node = strategy.node_rank
    with TemporaryDirectory() as folder:

        def fetched() -> tuple[int, Path] | None:
            if strategy.local_rank != 0:
                return None
            copied = Path(folder) / PurePosixPath(path).name
            try:
                get_filesystem(path).get_file(str(path), str(copied))
            except Exception as error:  # each file system has its own
                raise ConfigurationError(
                    f"Expected a checkpoint, one file, at {str(path)!r}, but it cannot be copied here:"
                    f" {type(error).__name__}: {error}. Copy it yourself and pass that path."
                ) from error
            return node, copied

        copies = in_step(fetched, stage="copy of a checkpoint")
        yield next(each[1] for each in copies if each is not None and each[0] == node)
        from_all_ranks(None)  # those of this node are through with it


def to_load(path: Path, trainer: pl.Trainer) -> Path:
    """This checkpoint; if it is half-written and ``ckpt_path="last"`` may have chosen it, the newest complete one.

    Raises:
        ConfigurationError: it is half-written, and there is no other.
    """
    path = saved_at(path)
    missing = why_incomplete(path)
    if missing is None:
        return path
    by_last = [callback._find_last_checkpoints(trainer) for callback in callbacks_of(trainer, ModelCheckpoint)]
    last = [Path(found).absolute() for each in by_last for found in each]
    others = [other for other in last if why_incomplete(other) is None] if path.absolute() in last else []
    if not others:
        raise ConfigurationError(
            f"Expected a complete checkpoint at {str(path)!r}, but {missing}: a run was killed while it saved. Delete"
            " it, and resume from another one."
        )
    newest = max(others, key=lambda other: other.stat().st_mtime)
    rank_zero_warn(
        f"OSDP: {path.name} is not complete, {missing}: a run was killed while it saved. {newest.name} is used, the"
        f" newest complete one; {path.name} can be deleted."
    )
    return newest


def why_incomplete(path: Path) -> str | None:
    """What a half-written checkpoint lacks; None if it is complete as far as its end tells, or no checkpoint at all."""
    if path.is_file():
        with path.open("rb") as file:  # what else it is than a file of ``torch.save``, loading will say
            is_begun = file.read(len(_ZIP)) in (b"", _ZIP)
        return "its file ends too early" if is_begun and not is_zipfile(path) else None
    if not path.is_dir() or not any(is_of_checkpoint(entry) for entry in path.iterdir()):
        return None
    if not (path / SHARD_METADATA).is_file():
        return f"{SHARD_METADATA} is not there"
    return None if is_zipfile(path / _METADATA_FILENAME) else f"{_METADATA_FILENAME} is not there or ends too early"


def load(path: Path, sharded: ShardedModel, trainer: pl.Trainer, *, weights_only: bool | None) -> dict[str, Any]:
    """Loads the model, and in a fit optimizers, from a full or sharded checkpoint; returns the rest of it.

    The trainer's callbacks may have added groups of parameters to optimizers. Where a fit averages weights, the whole
    weights of a full checkpoint are returned, too. Raises a `ConfigurationError` if the path is neither, or the
    checkpoint cannot be read, or is of another model.
    """
    is_sharded = _is_sharded_checkpoint(path)
    if not is_sharded and not path.is_file():
        raise ConfigurationError(
            f"Expected a checkpoint at {str(path)!r}: a file with the full state, or a folder with shards written by"
            " this strategy. Found neither."
        )
    is_fitting, strict = trainer.state.fn == TrainerFn.FITTING, trainer.lightning_module.strict_loading
    optimizers = trainer.optimizers if is_fitting else []
    checkpoint = read_saved(path / _METADATA_FILENAME if is_sharded else path, weights_only=weights_only)
    if optimizers:
        _restore_groups(trainer, checkpoint)
    if is_sharded:
        with _fitting(path):
            sharded.load_sharded(path, optimizers, strict=strict)
        return _copied(checkpoint)
    if "state_dict" not in checkpoint:
        raise ConfigurationError(
            f"Expected a checkpoint of the Trainer at {str(path)!r}, with weights under 'state_dict', got one without."
            " To load bare weights, call load_state_dict of the LightningModule before fit."
        )
    weights = checkpoint["state_dict"] if is_averaging(trainer) else checkpoint.pop("state_dict")
    with _fitting(path):
        sharded.load_model(weights, strict=strict)
    states = checkpoint.get("optimizer_states")
    if states is not None and optimizers:
        check_number(len(states), len(optimizers))
        for optimizer, state in zip(optimizers, states, strict=True):
            sharded.load_optimizer(optimizer, state)
    # Each rank has taken its part of these; whole they stay in the file.
    in_file = {} if states is None else {"optimizer_states": checkpoint.pop("optimizer_states")}
    return {**_copied(checkpoint), **in_file}


def _restore_groups(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Gives optimizers the groups of parameters that callbacks had added to them when the checkpoint was saved.

    Lightning does so in ``on_fit_start``, which is before a strategy that shards in setup has read the checkpoint.
    """
    states = checkpoint.get("callbacks", {})
    for callback in callbacks_of(trainer, BaseFinetuning):
        if callback.state_key in states:
            callback.load_state_dict(copy.deepcopy(states[callback.state_key]))
            BaseFinetuning.on_fit_start(callback, trainer, trainer.lightning_module)


def read_saved(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """What was saved in this file; its tensors are read when they are used, on CPU."""
    try:
        saved = torch.load(str(path), map_location="cpu", mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise ConfigurationError(
            f"Expected tensors and plain values only in checkpoint {str(path)!r}, got"
            f" {named[1] if named else 'what cannot be unpickled'}, and loading that may execute code. If you trust the"
            " file, name it in torch.serialization.add_safe_globals, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1."
        ) from error
    except Exception as error:  # damaged files are not refused by any one kind of error
        raise ConfigurationError(
            f"Expected a checkpoint at {str(path)!r}, but it cannot be read: {type(error).__name__}: {error}. Use"
            " another one."
        ) from error
    if not isinstance(saved, dict):
        raise ConfigurationError(
            f"Expected a dict in checkpoint {str(path)!r}, got {type(saved).__name__}. Use a checkpoint of the Trainer."
        )
    return saved


def _copied(saved: dict[str, Any]) -> dict[str, Any]:
    """The same with tensors in memory of their own, for the file may change while they are in use."""
    copy: dict[str, Any] = apply_to_collection(saved, dtype=Tensor, function=lambda tensor: tensor.detach().clone())
    return copy


@contextmanager
def _fitting(path: Path) -> Iterator[None]:
    """Has errors of loading into a model name the checkpoint, and what of the two does not fit."""
    try:
        yield
    except (CheckpointException, RuntimeError) as error:
        if isinstance(error, CheckpointException):
            rank, (first, _) = min(error.failures.items())
            reason = f"rank {rank} found: {type(first).__name__}: {first}"
        elif "Error(s) in loading state_dict" in str(error):
            reason = "; ".join(line.strip(" \t.") for line in str(error).splitlines()[1:])
        else:
            raise
        raise ConfigurationError(
            f"Expected a complete checkpoint of this model at {str(path)!r}, but {reason.rstrip('.')}. Load it into the"
            " model that was saved, or use another checkpoint."
        ) from error
