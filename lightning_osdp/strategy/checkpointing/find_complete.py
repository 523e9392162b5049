"""Which checkpoint to load, where a run of any strategy may have been killed while it saved under the real name."""

from __future__ import annotations

from pathlib import Path
from zipfile import is_zipfile

import lightning.pytorch as pl
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.checkpointing.saving import SHARD_METADATA, is_of_checkpoint, saved_at

_ZIP = b"PK\x03\x04"


def to_load(path: Path, trainer: pl.Trainer) -> Path:
    """This checkpoint; if it is half-written and ``ckpt_path="last"`` may have chosen it, the newest complete one.

    Raises:
        ConfigurationError: it is half-written, and there is no other.
    """
    path = saved_at(path)
    missing = why_incomplete(path)
    if missing is None:
        return path
    last = _found_by_last(trainer)
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
        return "its file ends too early" if _is_begun(path) and not is_zipfile(path) else None
    if not path.is_dir() or not any(is_of_checkpoint(entry) for entry in path.iterdir()):
        return None
    if not (path / SHARD_METADATA).is_file():
        return f"{SHARD_METADATA} is not there"
    return None if is_zipfile(path / _METADATA_FILENAME) else f"{_METADATA_FILENAME} is not there or ends too early"


def _is_begun(path: Path) -> bool:
    """Whether it is the beginning of a file of ``torch.save``, or of any; what else it is, loading will say."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) in (b"", _ZIP)


def _found_by_last(trainer: pl.Trainer) -> list[Path]:
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return [Path(found).absolute() for callback in callbacks for found in callback._find_last_checkpoints(trainer)]
