"""Lightning's averages of weights, as shards like the model's; to its own average, a whole copy, none can be added."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from typing_extensions import override

from lightning_osdp.apply import ShardedModel
from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.core.profile import ModelProfile, OperatorProfile
from lightning_osdp.errors import ConfigurationError


def check_averaging(trainer: pl.Trainer, state_dict_type: str) -> None:
    """Raises a ConfigurationError unless the Trainer's averages can be made of shards."""
    if callbacks_of(trainer, StochasticWeightAveraging):
        raise ConfigurationError(
            "Expected averages that can be made of shards, got StochasticWeightAveraging, which Lightning refuses for"
            " sharded models. Use WeightAveraging(), which averages all updates alike, or EMAWeightAveraging(); with a"
            " should_update() of your own it starts at an epoch, and a schedule of torch.optim.swa_utils.SWALR sets the"
            " learning rates."
        )
    if callbacks_of(trainer, WeightAveraging) and state_dict_type == "sharded":
        raise ConfigurationError(
            "Expected state_dict_type='full' with WeightAveraging, got 'sharded': the average is saved beside the"
            " model, in one file. Leave state_dict_type out."
        )


def is_averaging(trainer: pl.Trainer) -> bool:
    """Whether a fit of this Trainer keeps an average of the weights."""
    return bool(callbacks_of(trainer, WeightAveraging))


def with_averages(profile: ModelProfile, trainer: pl.Trainer, device: torch.device) -> ModelProfile:
    """The profile of a model whose averages on the device live from step to step, as states of its optimizer do."""
    for callback in callbacks_of(trainer, WeightAveraging):
        if _device_of(callback, device).type == device.type:
            profile = dataclasses.replace(
                profile,
                operators=tuple(_with_average(operator) for operator in profile.operators),
                buffer_bytes=2 * profile.buffer_bytes,
            )
    return profile


@contextmanager
def no_copies_of(module: nn.Module) -> Iterator[None]:
    """Within it, a copy of this module, whose shards cannot be copied, is empty; `average_shards` takes its place."""
    vars(module)["__deepcopy__"] = lambda _: nn.Module()
    try:
        yield
    finally:
        del vars(module)["__deepcopy__"]


def average_shards(trainer: pl.Trainer, sharded: ShardedModel, device: torch.device) -> None:
    """Puts shards in the place of the whole copies that callbacks have made of the model."""
    for callback in callbacks_of(trainer, WeightAveraging):
        assert callback._average_model is not None
        callback._average_model.module = AveragedShards(sharded, _device_of(callback, device))


class AveragedShards(nn.Module):
    """An average of a sharded model: a parameter for each of its shards and a copy of each buffer, in its order.

    Its state dict is whole, under the names of the user's own model; all ranks must ask for it, rank 0 gets values.
    """

    def __init__(self, sharded: ShardedModel, device: torch.device) -> None:
        super().__init__()
        self._sharded = sharded
        sharded.reshard()
        for index, shard in enumerate(sharded.module.parameters()):
            self.register_parameter(f"shard_{index}", nn.Parameter(_copy(shard, device), requires_grad=False))
        for index, buffer in enumerate(sharded.module.buffers()):
            self.register_buffer(f"buffer_{index}", _copy(buffer, device))

    @override
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Shards; the model's are shards then, too, for evaluation leaves units gathered."""
        self._sharded.reshard()
        return super().parameters(recurse)

    @override
    def state_dict(self, *_: Any, destination: dict[str, Any] | None = None, prefix: str = "", **__: Any) -> Any:
        found = {} if destination is None else destination
        with self._in_model():
            whole = self._sharded.model_state("full")
        found.update({prefix + name: value for name, value in whole.items()})
        return found

    @override
    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        whole = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        with self._in_model():
            self._sharded.load_model(whole, strict=True)

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        """Within it, the model has the average, and this has the model's own weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        model = self._sharded.module
        own, others = chain(self.parameters(), self.buffers()), chain(model.parameters(), model.buffers())
        for mine, other in zip(own, others, strict=True):
            kept = mine.detach().clone()
            mine.data.copy_(other.data)
            other.data.copy_(kept)


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True)


def _device_of(callback: WeightAveraging, device: torch.device) -> torch.device:
    return device if callback._device is None else torch.device(callback._device)


def _with_average(operator: OperatorProfile) -> OperatorProfile:
    parameters = tuple(
        dataclasses.replace(each, state_bytes_per_element=each.state_bytes_per_element + each.itemsize)
        for each in operator.parameters
    )
    return dataclasses.replace(
        operator, optimizer_bytes=operator.optimizer_bytes + operator.parameter_bytes, parameters=parameters
    )
