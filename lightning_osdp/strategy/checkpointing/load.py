"""Loading of a checkpoint, full or sharded, written by any strategy, into a sharded model.

Nothing in the checkpoint is executed unless the user asks for that. Errors name the entries that do not fit. A
checkpoint may be half-written: a run of another strategy writes under the final name and may have been killed then.
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

from lightning_osdp.apply import ShardedModel, StoredShards, check_number
from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.checkpointing.saving import SHARD_METADATA, existing_checkpoint, is_of_checkpoint
from lightning_osdp.strategy.runtime.all_ranks import all_gather_values, in_step

_ZIP = b"PK\x03\x04"
"""First bytes of each file of ``torch.save``."""


@contextmanager
def local_checkpoint(path: str | Path, strategy: FSDPStrategy) -> Iterator[Path]:
    """Yields the path of a checkpoint; of a remote file, that of a temporary copy on each node. Call it on all ranks.

    Raises:
        ConfigurationError: the file cannot be copied; on other ranks an `OSDPError`.
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
            except Exception as error:  # file systems of fsspec raise errors of many types
                raise ConfigurationError(
                    f"Expected a checkpoint, one file, at {str(path)!r}, but it cannot be copied here:"
                    f" {type(error).__name__}: {error}. Copy it yourself and pass that path."
                ) from error
            return node, copied

        copies = in_step(fetched, stage="copy of a checkpoint")
        yield next(copy[1] for copy in copies if copy is not None and copy[0] == node)
        all_gather_values(None)  # waits: all ranks of this node must have read the copy before it is deleted


def complete_checkpoint(path: Path, trainer: pl.Trainer) -> Path:
    """Gives the path of this checkpoint, or of the newest complete one if this is half-written.

    Another checkpoint is taken only where ``ckpt_path="last"`` may have chosen the half-written one.

    Raises:
        ConfigurationError: the checkpoint is half-written, and there is no other.
    """
    path = existing_checkpoint(path)
    missing = why_incomplete(path)
    if missing is None:
        return path
    callbacks = callbacks_of(trainer, ModelCheckpoint)
    last = [Path(name).absolute() for callback in callbacks for name in callback._find_last_checkpoints(trainer)]
    complete = [found for found in last if why_incomplete(found) is None] if path.absolute() in last else []
    if not complete:
        raise ConfigurationError(
            f"Expected a complete checkpoint at {str(path)!r}, but {missing}: a run was killed while it saved. Delete"
            " it, and resume from another one."
        )
    newest = max(complete, key=lambda found: found.stat().st_mtime)
    rank_zero_warn(
        f"OSDP: {path.name} is not complete, {missing}: a run was killed while it saved. {newest.name} is used, the"
        f" newest complete one; {path.name} can be deleted."
    )
    return newest


def why_incomplete(path: Path) -> str | None:
    """Says what a half-written checkpoint lacks; None if its end is there, or if the path has no checkpoint at all."""
    if path.is_file():
        with path.open("rb") as file:  # a file that ``torch.save`` has not begun is refused when it is loaded
            is_begun = file.read(len(_ZIP)) in (b"", _ZIP)
        return "its file ends too early" if is_begun and not is_zipfile(path) else None
    if not path.is_dir() or not any(is_of_checkpoint(entry) for entry in path.iterdir()):
        return None
    if not (path / SHARD_METADATA).is_file():
        return f"{SHARD_METADATA} is not there"
    return None if is_zipfile(path / _METADATA_FILENAME) else f"{_METADATA_FILENAME} is not there or ends too early"


class Loading:
    """A checkpoint that has been read, full or sharded: hooks may change its content before anything is loaded.

    Raises:
        ConfigurationError: the path has no checkpoint, or one that cannot be read or is of another model.

    Attributes:
        content: entries by name. In a full checkpoint, tensors of weights and optimizer states stay in the file until
            they are loaded. In a sharded one, weights are tensors on the meta device.
    """

    def __init__(self, path: Path, trainer: pl.Trainer, *, weights_only: bool | None) -> None:
        is_sharded = _is_sharded_checkpoint(path)
        if not is_sharded and not path.is_file():
            raise ConfigurationError(
                f"Expected a checkpoint at {str(path)!r}: a file with the full state, or a folder with shards written"
                " by this strategy. Found neither."
            )
        self._path, self._stored = path, StoredShards(path) if is_sharded else None
        saved = read_checkpoint_file(path / _METADATA_FILENAME if is_sharded else path, weights_only=weights_only)
        if self._stored is not None:
            saved["state_dict"] = dict(self._stored.weights)
            if "lr_schedulers" in saved:  # a checkpoint without this entry has weights only
                saved["optimizer_states"] = [{} for _ in range(self._stored.num_optimizers)]
        if "state_dict" not in saved:
            raise ConfigurationError(
                f"Expected a checkpoint of the Trainer at {str(path)!r}, with weights under 'state_dict', got one"
                " without. To load bare weights, call load_state_dict of the LightningModule before fit."
            )
        if trainer.state.fn == TrainerFn.FITTING and "optimizer_states" in saved:
            check_number(len(saved["optimizer_states"]), len(trainer.optimizers))
        in_file: dict[str, Any] = {key: saved.pop(key) for key in ("state_dict", "optimizer_states") if key in saved}
        # these tensors are used for long, and the file that they are mapped to may change meanwhile
        copied = apply_to_collection(saved, dtype=Tensor, function=lambda tensor: tensor.detach().clone())
        self.content: dict[str, Any] = {**copied, **in_file}

    def load_model(self, content: Mapping[str, Any], sharded: ShardedModel, *, strict: bool) -> None:
        """Loads the model from the content as hooks have left it."""
        with self._fitting():
            if self._stored is None:
                sharded.load_model(content["state_dict"], strict=strict)
            else:
                sharded.load_stored(self._stored, content["state_dict"], strict=strict)

    def load_optimizers(self, content: Mapping[str, Any], sharded: ShardedModel, trainer: pl.Trainer) -> None:
        """Loads optimizers from the content, after callbacks have added their parameter groups again."""
        _restore_groups(trainer, content)
        if self._stored is None:
            for optimizer, state in zip(trainer.optimizers, content["optimizer_states"], strict=False):
                sharded.load_optimizer(optimizer, state)
        elif content["optimizer_states"]:
            with self._fitting():
                sharded.load_stored_optimizers(self._stored, trainer.optimizers)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """Turns errors of loading into one that names the checkpoint and the entries that do not fit."""
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
                f"Expected a complete checkpoint of this model at {str(self._path)!r}, but {reason.rstrip('.')}. Load"
                " it into the model that was saved, or use another checkpoint."
            ) from error


def _restore_groups(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Adds the parameter groups that finetuning callbacks had added to optimizers when the checkpoint was saved.

    Lightning adds them in ``on_fit_start``, before a strategy that shards in setup has read the checkpoint.
    """
    states = checkpoint.get("callbacks", {})
    for callback in callbacks_of(trainer, BaseFinetuning):
        if callback.state_key in states:
            callback.load_state_dict(copy.deepcopy(states[callback.state_key]))
            BaseFinetuning.on_fit_start(callback, trainer, trainer.lightning_module)


def read_checkpoint_file(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Reads the dict in a file of ``torch.save``; its tensors are on CPU and read from the file when they are used."""
    try:
        saved = torch.load(str(path), map_location="cpu", mmap=True, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise ConfigurationError(
            f"Expected tensors and plain values only in checkpoint {str(path)!r}, got"
            f" {named[1] if named else 'what cannot be unpickled'}, and loading that may execute code. If you trust the"
            " file, name it in torch.serialization.add_safe_globals, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1."
        ) from error
    except Exception as error:  # damaged files raise errors of many types
        raise ConfigurationError(
            f"Expected a checkpoint at {str(path)!r}, but it cannot be read: {type(error).__name__}: {error}. Use"
            " another one."
        ) from error
    if not isinstance(saved, dict):
        raise ConfigurationError(
            f"Expected a dict in checkpoint {str(path)!r}, got {type(saved).__name__}. Use a checkpoint of the Trainer."
        )
    return saved
