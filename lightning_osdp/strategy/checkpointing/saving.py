"""Saving of checkpoints that are complete wherever they bear their name, whenever a rank is killed.

A checkpoint is written at ``<name>.part`` and renamed when all of it is on disk. A rename cannot replace a folder, so
the old folder is renamed to ``<stem>.osdp-replaced<suffix>`` until the new one is in place; ``ckpt_path="last"`` finds
that name, too. A checkpoint to be deleted is renamed to ``<name>.part`` first.

Lightning's ``_atomic_save`` writes files alone and does not wait for the disk. Its move from the system's temporary
folder to another file system is a copy, which a kill cuts off.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_save
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.runtime.all_ranks import on_rank_zero

_PART = ".part"
_SHARD_SUFFIX, SHARD_METADATA = ".distcp", ".metadata"


class CompleteFiles(TorchCheckpointIO):
    """Lightning's checkpoint files, each under its name only when it is complete; remote files as Lightning writes."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        _make_room(path)
        _write(checkpoint, _part_path(path))
        _put_in_place(path)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        if _is_local_file_protocol(path):
            _discard(Path(path))
        else:
            super().remove_checkpoint(path)


def save_shards(checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
    """Writes a sharded checkpoint; all ranks must call it with the same path, and all raise if one cannot write.

    States of model and optimizers are taken out of the given dict.

    Raises:
        ConfigurationError: the path is remote, or storage options are given.
        IsADirectoryError: the path is a folder that has other files than a checkpoint's.
    """
    if storage_options is not None:
        raise ConfigurationError(
            f'Expected no storage_options with state_dict_type="sharded", got {storage_options!r}: shards are written'
            " by torch.distributed.checkpoint. Leave them out."
        )
    _check_shards_at(path)
    folder = Path(path)
    on_rank_zero(lambda: _make_room(folder))
    states = {"model": checkpoint.pop("state_dict")}
    states.update({f"optimizer_{i}": state for i, state in enumerate(checkpoint.pop("optimizer_states", []))})
    _distributed_checkpoint_save(states, _part_path(folder))  # all of it is on disk when this returns

    def complete() -> None:
        _write(checkpoint, _part_path(folder) / _METADATA_FILENAME)
        _put_in_place(folder)

    on_rank_zero(complete)


def is_collecting_checkpoint(frames: Iterable[tuple[FrameType, int]]) -> bool:
    """Tells whether Lightning collects the entries of a checkpoint, which hooks will see, in one of these frames."""
    return any(frame.f_code is _CheckpointConnector.dump_checkpoint.__code__ for frame, _ in frames)


def check_folders(trainer: pl.Trainer, state_dict_type: str) -> None:
    """Raises a `ConfigurationError` if shards are to be saved where they cannot be written."""
    for callback in callbacks_of(trainer, ModelCheckpoint):
        if callback.dirpath and state_dict_type == "sharded":
            _check_shards_at(callback.dirpath)


def _check_shards_at(path: str | Path) -> None:
    if not _is_local_file_protocol(path):
        raise ConfigurationError(
            f'Expected a local path with state_dict_type="sharded", got {str(path)!r}: each rank writes its shards to'
            " a folder that all of them see. Save them there and copy them afterwards, or leave state_dict_type out."
        )


def existing_checkpoint(path: Path) -> Path:
    """Gives the path of a checkpoint; if a run was killed while replacing it, that of the replaced one."""
    old = _replaced_path(path)
    if path.exists() or not old.exists():
        return path
    rank_zero_warn(f"OSDP: {path.name} was being replaced when a run was killed; {old.name} is used, the one before.")
    return old


def warn_of_incomplete(trainer: pl.Trainer) -> None:
    """Warns of checkpoints that a run was writing when it was killed, which are never resumed from."""
    folders = {Path(callback.dirpath) for callback in callbacks_of(trainer, ModelCheckpoint) if callback.dirpath}
    for folder in sorted(folders):
        names = sorted(found.name for found in folder.glob(f"*{ModelCheckpoint.FILE_EXTENSION}{_PART}"))
        if names:
            rank_zero_warn(
                f"OSDP: a run was killed while it wrote or removed {', '.join(names)} in {folder}. These are not"
                " complete and are skipped; they can be deleted."
            )


def _part_path(path: Path) -> Path:
    # Lightning saves ckpt_<version> before SLURM requeues a job, and would take a name with "ckpt_" for the newest
    return path.with_name(path.name.replace("ckpt_", "ckpt-") + _PART)


def _replaced_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.osdp-replaced{path.suffix}")


def _make_room(path: Path) -> None:
    """Clears the temporary names of a path; refuses a folder that has more than a checkpoint."""
    if path.is_dir() and not path.is_symlink():
        names = sorted(entry.name for entry in path.iterdir() if not is_of_checkpoint(entry))
        if names:
            raise IsADirectoryError(
                f"Expected {str(path)!r} to be free or a checkpoint to replace, but it is a folder with"
                f" {names[0]!r}. Save under another name."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove(_part_path(path))
    _remove(_part_path(_replaced_path(path)))


def is_of_checkpoint(entry: Path) -> bool:
    """Tells whether a sharded checkpoint's folder may have this entry."""
    return entry.suffix == _SHARD_SUFFIX or entry.name in (_METADATA_FILENAME, SHARD_METADATA)


def _write(value: object, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(path: Path) -> None:
    part, old = _part_path(path), _replaced_path(path)
    if os.path.lexists(path) and (path.is_dir() or part.is_dir()):
        _discard(old)
        path.rename(old)
    part.replace(path)
    _sync(path.parent)
    _discard(old)


def _discard(path: Path) -> None:
    """Deletes a checkpoint under a temporary name: a half-deleted one must not be taken for complete."""
    if os.path.lexists(path):
        part = _part_path(path)
        _remove(part)
        path.rename(part)
        _remove(part)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    """Writes a rename within this folder to disk, so that it survives the machine and not only the process."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
