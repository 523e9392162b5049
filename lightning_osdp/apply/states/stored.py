"""Sharded checkpoints: names and shapes of what is stored, and reading it into the shards of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_osdp.apply.internals import dtensors
from lightning_osdp.apply.states.state import check_number, load_optimizer, whole_parameters
from lightning_osdp.apply.updating.host_updates import NOTHING_HELD, HostRows
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.splitting import JoinedShards

_MODEL = "model"


class StoredShards:
    """Folder of a sharded checkpoint, of any number of ranks; an earlier version wrote some with FSDP1.

    The folder is one of ``torch.distributed.checkpoint``, with the entries ``model``, ``optimizer_0``, ``optimizer_1``,
    ...; optimizers without state have no entry.

    Attributes:
        weights: stored values of the model by name, as tensors on meta, which may be renamed or left out before
            `load_model`; a value that is no tensor is an empty one.
        num_optimizers: number of optimizers that are stored.

    Raises:
        ConfigurationError: what the folder says of itself cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._path, self._metadata = path, FileSystemReader(path).read_metadata()
        except Exception as error:  # damaged files raise errors of many types
            raise ConfigurationError(
                f"Expected a checkpoint at {str(path)!r}, but its .metadata cannot be read: {type(error).__name__}:"
                f" {error}. Use another one."
            ) from error
        self.weights: dict[str, Tensor] = {}
        places = self._metadata.planner_data
        for key, entry in self._metadata.state_dict_metadata.items():
            if places[key][0] == _MODEL:
                shape, dtype = torch.Size([0]), torch.uint8
                if isinstance(entry, TensorStorageMetadata) and len(places[key]) == 2:
                    shape, dtype = entry.size, entry.properties.dtype
                self.weights[places[key][1]] = torch.empty(shape, dtype=dtype, device="meta")
        self.num_optimizers = len({place[0] for place in places.values()} - {_MODEL})

    def load_model(self, module: nn.Module, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Reads weights into the module's shards in place; all ranks must call it.

        Args:
            module: a module under ``fully_shard``.
            weights: `weights` under the names of the module's state dict; other tensors in it are whole.
            strict: require the names of the module.

        Raises:
            CheckpointException: a tensor of the module has another shape in the checkpoint.
            ConfigurationError: a tensor was computed from weights that are not read yet.
            RuntimeError: ``strict``, and names are others.
        """
        names = {id(value): name for name, value in self.weights.items()}
        computed = [n for n, v in weights.items() if id(v) not in names and isinstance(v, Tensor) and v.is_meta]
        if computed:
            raise ConfigurationError(
                f"Expected on_load_checkpoint to rename or leave out weights of a sharded checkpoint, but"
                f" {computed[0]!r} was computed from them, before each rank reads its shards. Save with"
                ' state_dict_type="full", or compute after loading, in on_fit_start within `with'
                " trainer.strategy.gathered(write_back=True): ...`."
            )
        state = module.state_dict()
        unread = {name: names[id(weights[name])] for name in state if id(weights.get(name)) in names}
        planner = DefaultLoadPlanner(allow_partial_load=not strict)
        while unread:  # runs again for values that are wanted under several names
            once = {stored: name for name, stored in unread.items()}
            read = {stored: state[name] for stored, name in once.items()}
            load({_MODEL: read}, checkpoint_id=self._path, planner=planner)
            for stored, name in once.items():
                state[name] = read[stored]
                del unread[name]
        for name in state.keys() - weights.keys():
            del state[name]
        state.update({name: value for name, value in weights.items() if id(value) not in names or name not in state})
        module.load_state_dict(state, strict=strict)  # the state dict of a module knows versions of modules

    def load_optimizers(
        self, module: nn.Module, optimizers: Sequence[Optimizer], host: HostRows = NOTHING_HELD
    ) -> None:
        """Reads states of optimizers of the module's shards, on the host of what it holds; all ranks must call it.

        Raises:
            PlanMismatchError: a stored optimizer has other parameter groups.
            RuntimeError: another number of optimizers is stored.
        """
        check_number(self.num_optimizers, len(optimizers))
        parameters = whole_parameters(module)
        on_host = {name for name, parameter in module.named_parameters() if host.holds(parameter)}
        for index, optimizer in enumerate(optimizers):
            load_optimizer(module, optimizer, self._read(f"optimizer_{index}", parameters, on_host), host)

    def _read(self, optimizer: str, parameters: Mapping[str, Tensor], on_host: Collection[str]) -> dict[str, Any]:
        """State of one optimizer by name; a tensor with the shape of its parameter is sharded as the parameter is."""
        places = self._metadata.planner_data
        entries: dict[str, Any] = {}
        for key, stored in self._metadata.state_dict_metadata.items():
            if places[key][0] != optimizer:
                continue
            if isinstance(stored, TensorStorageMetadata):
                name = places[key][2] if len(places[key]) > 2 else ""  # no parameter has none
                entries[key] = _unread(stored, parameters.get(name), on_host=name in on_host)
            else:
                entries[key] = "read in its place"
        load(entries, checkpoint_id=self._path)
        state: dict[str, Any] = unflatten_state_dict(entries, places)[optimizer]
        return state


def _unread(stored: TensorStorageMetadata, parameter: Tensor | None, *, on_host: bool) -> Tensor:
    """Memory to read an entry into: shards as of the parameter, or a whole tensor if it has another shape."""
    dtype = stored.properties.dtype
    if parameter is not None and parameter.shape == stored.size:
        if isinstance(parameter, JoinedShards):
            return parameter.empty_like(dtype)
        if isinstance(parameter, DTensor) and on_host:
            rows = torch.empty_like(dtensors.local(parameter), dtype=dtype, device="cpu")
            return dtensors.of_rows_there(rows, parameter)
        if isinstance(parameter, DTensor):
            return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(stored.size, dtype=dtype)
