"""Profile of a model on a later batch, while training goes on."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_osdp.core.axes import KEEP, values_of
from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler import profile_model, replica_of, resized, stand_in, tensors_in
from lightning_osdp.strategy.batching.first_batch import shapes_of
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning.training_step import as_trained, mute_logging

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_OPERATIONS = 16.0
"""Operations for each byte that a device moves meanwhile, as `BatchProfiler` takes it, in any precision."""


class BatchProfiler:
    """Profiler of later batches, by a copy of the whole module that has no values: the module itself is sharded then.

    Training goes on meanwhile. A rank profiles by itself, on fake tensors; nothing is run or timed. Seconds follow from
    operations, by rates with which the first batch takes as long as was measured.

    Args:
        trainer: that fits.
        module: whole still, in automatic optimization.
        options: of the strategy.
        known: profile of the module.
        batch: that it was profiled on; its shapes are kept alone.
        num_samples: samples in that batch.
        micro_batch_size: samples that batches have as planned.

    Attributes:
        shapes: shapes of the first batch with as many samples as planned.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        options: Options,
        known: ModelProfile,
        batch: Any,
        *,
        num_samples: int,
        micro_batch_size: int,
    ) -> None:
        self._trainer, self._module, self._options, self._known = trainer, module, options, known
        strided = (tensor for tensor in tensors_in(batch) if tensor.layout is torch.strided)
        first = copy.deepcopy(batch, {id(tensor): stand_in(tensor) for tensor in strided})
        planned = resized(first, num_samples, micro_batch_size)  # None where all batches have as many
        self._first, self.shapes = (first, num_samples), shapes_of(first if planned is None else planned)
        replica = replica_of(module)
        assert isinstance(replica, pl.LightningModule)
        self._replica = replica
        self._rates: DeviceRates | None = None

    def profile(self, batch: Any, num_samples: int, plan: Plan) -> ModelProfile:
        """Profiles a batch on the device, with blocks that recompute or do what one of them does in a plan.

        Raises:
            ProfileError: training_step reads values that fake tensors do not have, or runs other operators than before.
        """
        if self._rates is None:
            self._rates = self._measured(is_cuda=self._trainer.strategy.root_device.type == "cuda")
        choices = self._options.profiled_choices
        wanted = {KEEP, "recompute", *(block.treatment["saves"] for block in plan.blocks)}
        activations = [name for name in choices["activations"] if not wanted.isdisjoint(values_of((name,)))]
        found = self._profile(batch, num_samples, self._rates, choices | {"activations": activations})
        if _parts(found, activations) != _parts(self._known, activations):
            raise ProfileError(
                "Expected a step on a longer batch to run the operators of the one that was profiled, in blocks with"
                " the same choices, but it does not."
            )
        return dataclasses.replace(
            found,
            # what the optimizer keeps of them does not depend on the batch
            operators=tuple(
                dataclasses.replace(each, cut=new.cut) for each, new in zip(self._known, found, strict=True)
            ),
            optimizer=self._known.optimizer,
            buffer_bytes=self._known.buffer_bytes,
            fingerprint=self._known.fingerprint,
            notes=self._known.notes,
        )

    def _measured(self, *, is_cuda: bool) -> DeviceRates:
        """Rates with which the first batch takes as long as was measured."""
        plain = DeviceRates(flops_per_s=dict.fromkeys(_DTYPES, _OPERATIONS), bytes_per_s=1.0, is_cuda=is_cuda)
        batch, num_samples = self._first
        rated = self._profile(batch, num_samples, plain, {"activations": (KEEP,)})  # as was timed: nothing recomputes
        measured_s, rated_s = (
            sum((segment.forward_s + segment.backward_s).at(num_samples) for segment in each.segments)
            for each in (self._known, rated)
        )
        factor = rated_s / measured_s if measured_s > 0 else 1.0
        flops_per_s = dict.fromkeys(_DTYPES, factor * _OPERATIONS)
        return DeviceRates(flops_per_s=flops_per_s, bytes_per_s=factor, is_cuda=is_cuda)

    def _profile(self, batch: Any, num_samples: int, rates: DeviceRates, choices: Mapping[str, Any]) -> ModelProfile:
        trainer, replica = self._trainer, self._replica
        # users may have frozen parameters since, or put modules into evaluation; sliced ones have other names
        modules, parameters = dict(self._module.named_modules()), dict(self._module.named_parameters())
        for name, child in replica.named_modules():
            if name in modules and self._module.training:  # else this is a validation, and all are in evaluation
                child.training = modules[name].training
        for name, parameter in replica.named_parameters():
            if name in parameters:
                parameter.requires_grad = parameters[name].requires_grad
        replica.trainer = trainer
        try:
            with mute_logging(trainer, replica):
                training = as_trained(trainer, replica, None, num_samples)
                return profile_model(replica, batch, training, rates=rates, known=self._known, **choices)
        finally:
            replica.trainer = None


def _parts(profile: ModelProfile, activations: Sequence[str]) -> tuple[object, ...]:
    """Operators and blocks that plans of a model name, with what the blocks can do of these choices."""
    values = values_of(activations)
    blocks = {block.name: [each for each in block.segments if each in values] for block in profile.blocks}
    return [each.name for each in profile], blocks
