"""Optimizer states in the folder of a sharded checkpoint, read into shards.

The folder is one of ``torch.distributed.checkpoint``, with the entries ``model``, ``optimizer_0``, ``optimizer_1``, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from lightning_osdp.splitting import JoinedShards


def check_number(num_stored: int, num_optimizers: int) -> None:
    """Refuses a checkpoint with another number of optimizers.

    Raises:
        RuntimeError: the numbers differ.
    """
    if num_stored != num_optimizers:
        raise RuntimeError(
            f"Expected a checkpoint with the state of {num_optimizers} optimizers, as configured, got {num_stored}."
            " Configure as many as were saved, or load the weights alone."
        )


def read_optimizers(path: Path, num_optimizers: int, parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
    """States of optimizers by name, one after the other; none if none is stored. All ranks must read all of them.

    Args:
        path: of the folder.
        num_optimizers: that are configured; 0 to read none.
        parameters: of the whole model by name, as this rank has them. State of a parameter's shape is sharded as it is.

    Raises:
        RuntimeError: another number of optimizers is stored.
    """
    metadata = FileSystemReader(path).read_metadata()
    stored = {place[0] for place in metadata.planner_data.values()} - {"model"}
    if not stored or not num_optimizers:
        return
    check_number(len(stored), num_optimizers)
    for index in range(num_optimizers):
        yield _read(path, metadata, f"optimizer_{index}", parameters)


def _read(path: Path, metadata: Metadata, optimizer: str, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    places = metadata.planner_data
    entries: dict[str, Any] = {}
    for key, stored in metadata.state_dict_metadata.items():
        if places[key][0] != optimizer:
            continue
        if isinstance(stored, TensorStorageMetadata):
            entries[key] = _empty(stored, parameters.get(places[key][2]) if len(places[key]) > 2 else None)
        else:
            entries[key] = "read in its place"
    load(entries, checkpoint_id=path)
    state: dict[str, Any] = unflatten_state_dict(entries, places)[optimizer]
    return state


def _empty(stored: TensorStorageMetadata, parameter: Tensor | None) -> Tensor:
    """Memory to read an entry into: shards like the parameter's, or all of what has another shape."""
    dtype = stored.properties.dtype
    if parameter is None or parameter.shape != stored.size:
        return torch.empty(stored.size, dtype=dtype)
    if isinstance(parameter, JoinedShards):
        return parameter.empty_like(dtype)
    if isinstance(parameter, DTensor):
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(stored.size, dtype=dtype)
