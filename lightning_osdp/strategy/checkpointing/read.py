"""Reading checkpoints: nothing is executed unless that was asked for, and what does not fit is told."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_osdp.errors import ConfigurationError


def read_saved(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """What was saved in this file; its tensors are read when they are used, on CPU.

    Args:
        path: of a full checkpoint, or of what is beside the shards of one.
        weights_only: of ``torch.load``; None: its default, True unless the environment says otherwise.

    Raises:
        ConfigurationError: the file is damaged, holds no dict, or what only code in it can make.
    """
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


def copied(saved: dict[str, Any]) -> dict[str, Any]:
    """The same with tensors in memory of their own, for the file may change while they are in use."""
    copy: dict[str, Any] = apply_to_collection(saved, dtype=Tensor, function=lambda tensor: tensor.detach().clone())
    return copy


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Has errors of loading into a model name the checkpoint, and what of the two does not fit.

    Raises:
        ConfigurationError: the checkpoint is of another model, or damaged.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        reason = f"rank {rank} found: {type(first).__name__}: {first}"
        raise _does_not_fit(path, reason) from error
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        lines = [line.strip(" \t.") for line in str(error).splitlines()]
        raise _does_not_fit(path, "; ".join(lines[1:])) from error


def _does_not_fit(path: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expected a complete checkpoint of this model at {str(path)!r}, but {reason.rstrip('.')}. Load it into the"
        " model that was saved, or use another checkpoint."
    )
