"""Averages of weights, for Lightning's `WeightAveraging`, kept as shards like the model's.

Lightning's own average is a whole copy of the model, to which no shard can be added.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from typing_extensions import override

from lightning_osdp.apply import ShardedModel
from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.core.profile import ModelProfile, OperatorProfile
from lightning_osdp.errors import ConfigurationError

STAY = "all states of optimizers stay on the device, where the average of weights is"


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


def with_averages(profile: ModelProfile, trainer: pl.Trainer, device: torch.device) -> ModelProfile:
    """Adds averages that are kept on the device to a profile: they stay between steps, as optimizer states do.

    States then stay there, too: they are not told from averages.
    """
    for callback in callbacks_of(trainer, WeightAveraging):
        if _device_of(callback, device).type == device.type:
            profile = dataclasses.replace(
                profile,
                operators=tuple(_with_average(operator) for operator in profile.operators),
                buffer_bytes=2 * profile.buffer_bytes,  # the average has a copy of each buffer
                optimizer=dataclasses.replace(profile.optimizer, host_s_per_element=None),
                notes=(*profile.notes, *([STAY] if profile.optimizer.host_s_per_element is not None else [])),
            )
    return profile


@contextmanager
def no_copies_of(module: nn.Module) -> Iterator[None]:
    """Has `copy.deepcopy` of this module give an empty module: shards cannot be copied.

    Lightning copies the model for its average before the strategy's setup; `average_shards` then replaces the copy.
    """
    vars(module)["__deepcopy__"] = lambda _: nn.Module()
    try:
        yield
    finally:
        del vars(module)["__deepcopy__"]


def average_shards(trainer: pl.Trainer, sharded: ShardedModel, device: torch.device) -> None:
    """Replaces the whole copy of the model that each averaging callback has made by shards."""
    for callback in callbacks_of(trainer, WeightAveraging):
        assert callback._average_model is not None
        callback._average_model.module = AveragedShards(sharded, _device_of(callback, device))


class AveragedShards(nn.Module):
    """Average of a sharded model: one parameter for each shard and a copy of each buffer, in the model's order.

    The state dict is whole, under the names of the user's own model. All ranks must ask for it; rank 0 gets values.
    """

    def __init__(self, sharded: ShardedModel, device: torch.device) -> None:
        super().__init__()
        self._sharded = sharded
        sharded.reshard()
        for index, shard in enumerate(sharded.module.parameters()):
            average = nn.Parameter(shard.detach().to(device, copy=True), requires_grad=False)
            self.register_parameter(f"shard_{index}", average)
        for index, buffer in enumerate(sharded.module.buffers()):
            self.register_buffer(f"buffer_{index}", buffer.detach().to(device, copy=True))

    @override
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields the average's shards, with the model resharded, so that the two can be paired."""
        self._sharded.reshard()  # evaluation leaves units unsharded
        return super().parameters(recurse)

    @override
    def state_dict(self, *_: Any, destination: dict[str, Any] | None = None, prefix: str = "", **__: Any) -> Any:
        state = {} if destination is None else destination
        with self._in_model():
            whole = self._sharded.model_state("full")
        state.update({prefix + name: value for name, value in whole.items()})
        return state

    @override
    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        whole = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        with self._in_model():
            self._sharded.load_model(whole, strict=True)

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        """Exchanges the model's weights with the average until the block ends: only the model knows the names."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        model = self._sharded.module
        averages, weights = chain(self.parameters(), self.buffers()), chain(model.parameters(), model.buffers())
        for average, weight in zip(averages, weights, strict=True):
            value = average.detach().clone()
            average.data.copy_(weight.data)
            weight.data.copy_(value)


def _device_of(callback: WeightAveraging, device: torch.device) -> torch.device:
    return device if callback._device is None else torch.device(callback._device)


def _with_average(operator: OperatorProfile) -> OperatorProfile:
    parameters = tuple(
        dataclasses.replace(p, state_bytes_per_element=p.state_bytes_per_element + p.itemsize)
        for p in operator.parameters
    )
    return dataclasses.replace(
        operator, optimizer_bytes=operator.optimizer_bytes + operator.parameter_bytes, parameters=parameters
    )
