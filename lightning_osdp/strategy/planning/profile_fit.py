"""From a Trainer about to fit to the profile of its model, on a batch of its own training data."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_osdp.apply import check_initializable
from lightning_osdp.callbacks.peak import elements_in
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.progress import Progress
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.profiler import (
    ComputePrecision,
    TrainingStep,
    is_out_of_memory,
    profile_model,
    resized,
    without_values,
)
from lightning_osdp.strategy.batching.larger_batches import longest
from lightning_osdp.strategy.batching.loaders import first_batch, samples_in, training_loaders
from lightning_osdp.strategy.batching.read_once import Peeked
from lightning_osdp.strategy.checkpointing.averaging import with_averages
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning.manual_step import automatic_step, in_children, summed_step
from lightning_osdp.strategy.planning.parameter_groups import Group
from lightning_osdp.strategy.planning.training_step import configured_optimizers, forget_loaders, muted, to_device
from lightning_osdp.strategy.runtime.all_ranks import in_step

_HOOKS_BEFORE_STEPS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")

_FAR = 2
"""Factor by which a micro-batch may lie beyond the measured ones before it is measured itself."""


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What a fit begins with, and the profile of its model.

    Attributes:
        loaders: of the training data.
        peeked: what was read of loaders that can be read only once.
        batch: of the training data, on the device.
        model: profiled on that batch, or on as many of its samples as are planned.
        schedules: learning-rate schedulers that ``configure_optimizers`` returned.
        groups: parameter groups of its optimizers.
        is_too_large: whether it does not fit on a device whole.
    """

    loaders: CombinedLoader
    peeked: list[Peeked]
    batch: Any
    model: ModelProfile
    schedules: list[Any]
    groups: list[Group]
    is_too_large: bool


class FitProfiler:
    """Profiles the module of a Trainer that is about to fit. All ranks call it.

    Args:
        trainer: with the training data.
        module: what it fits.
        options: of the strategy.
        progress: called with what is being done.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, options: Options, progress: Progress) -> None:
        self._trainer, self._module, self._options, self._progress = trainer, module, options, progress
        self._device = trainer.strategy.root_device

    def first(self) -> Profiled:
        """On the first batch of the training data.

        Raises:
            ProfileError: the model cannot be profiled.
            ConfigurationError: it cannot be trained on this device.
        """
        _check_synchronised_batch_norm(self._module, self._device)
        check_initializable(self._module, self._device)
        loaders = training_loaders(self._trainer)
        batch, peeked = self._chosen(loaders)
        batch = to_device(self._trainer, self._module, batch)
        schedules: list[Any] = []
        groups: list[Group] = []
        with self._needing_memory():
            is_too_large = not all(in_step(self._is_moved, stage="moving the model"))
            if is_too_large:
                rank_zero_warn(
                    f"OSDP: {type(self._module).__name__} does not fit on one device whole, and is profiled by its"
                    " shapes: bytes are as ever, step times those of its operations one by one, which are less true."
                )
                self._module.to("cpu")
            with standing_for(self._module, is_too_large=is_too_large):
                model = self._profile(batch, schedules, groups)
        return Profiled(
            loaders=loaders,
            peeked=peeked,
            batch=batch,
            model=model,
            schedules=schedules,
            groups=groups,
            is_too_large=is_too_large,
        )

    def _is_moved(self) -> bool:
        """Moves the model to the device, or leaves it on the CPU where there is no room; so is one without values."""
        if any(parameter.is_meta for parameter in self._module.parameters()):
            return True
        try:
            self._module.to(self._device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._module.to("cpu")
            return False
        return True

    def _chosen(self, loaders: CombinedLoader) -> tuple[Any, list[Peeked]]:
        """The batch to profile, and what was read of loaders that can be read only once."""
        wanted = self._options.profile_batch
        if wanted is None:
            return first_batch(loaders)
        if not isinstance(wanted, str):
            return first_batch(loaders, wanted) if callable(wanted) else (wanted, [])
        batch, peeked = first_batch(loaders, longest)
        numbers = in_step(lambda: elements_in(batch), stage="looking for the longest batch")
        return self._trainer.strategy.broadcast(batch, src=numbers.index(max(numbers))), peeked

    def nearer(self, profiled: Profiled, num_samples: int, *, free_bytes: int) -> Profiled:
        """The same, measured with a micro-batch of so many samples if that is far from those that were measured.

        What lies beyond these is a line through two of them: the less true, the farther away. The step runs unsharded
        while it is measured; where there is no memory for that, everything stays as it was.

        Args:
            profiled: what was measured.
            num_samples: of the micro-batch.
            free_bytes: on this rank's device.
        """
        known = profiled.model.profiled_batch_size
        is_far = not known / (2 * _FAR) <= num_samples <= known * _FAR
        is_wanted = is_far and unsharded_bytes(profiled.model, num_samples) <= free_bytes
        batch = resized(profiled.batch, samples_in(profiled.batch), num_samples) if is_wanted else None
        if not all(in_step(lambda: batch is not None, stage="measuring again")):
            return profiled
        with self._needing_memory(), standing_for(self._module, is_too_large=profiled.is_too_large):
            return replace(profiled, model=self._profile(batch, [], []))

    def _profile(self, batch: Any, schedules: list[Any], groups: list[Group]) -> ModelProfile:
        trainer, module, strategy = self._trainer, self._module, self._trainer.strategy
        with muted(trainer, module), _needing_hooks(module):
            step = (automatic_step if module.automatic_optimization else summed_step)(trainer, module)

            def run(batch: Any) -> Any:
                with trainer.precision_plugin.train_step_context():
                    return step(batch)

            optimizers = configured_optimizers(trainer, schedules, groups)
            profile = profile_model(
                module,
                batch,
                TrainingStep(run, optimizers, _precision(strategy), samples_in(batch), self._device),
                activations=_activations(self._options),
                blocks=self._options.recomputed or None,
                together=in_step,
                progress=self._progress,
            )
        if not module.automatic_optimization:
            profile = in_children(profile)
        return with_averages(profile, trainer, self._device)

    @contextmanager
    def _needing_memory(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ProfileError(
                "Expected the whole model and one step on the user's batch to fit on one device while it is profiled,"
                f" but memory ran out: {error}. Use a smaller batch with batch_size='scale', or pass plan=."
            ) from error
        finally:
            forget_loaders(self._trainer)


def standing_for(module: nn.Module, *, is_too_large: bool) -> AbstractContextManager[None]:
    """What a module is profiled in: without its values, where these are not on the device."""
    return without_values(module) if is_too_large else nullcontext()


@contextmanager
def _needing_hooks(module: pl.LightningModule) -> Iterator[None]:
    """Says of an attribute that is not there yet which hook is to set it."""
    try:
        yield
    except AttributeError as error:
        hooks = [hook for hook in _HOOKS_BEFORE_STEPS if error.obj is module and _sets(module, hook, str(error.name))]
        if not hooks:
            raise
        raise ProfileError(
            f"training_step reads self.{error.name}, which is not there when the model is profiled, in setup:"
            f" {hooks[0]} sets it later. Set it in __init__, setup or configure_model, too."
        ) from error


def _sets(module: nn.Module, hook: str, name: str) -> bool:
    """Whether a hook of the module assigns to an attribute of this name."""
    code = getattr(getattr(type(module), hook, None), "__code__", None)
    return code is not None and any(
        each.opname == "STORE_ATTR" and each.argval == name for each in dis.get_instructions(code)
    )


def unsharded_bytes(model: ModelProfile, num_samples: int) -> int:
    """Parameters, gradients, what forward saves, and what one segment needs besides: a step without an optimizer."""
    states = sum(operator.parameter_bytes + operator.trainable_bytes for operator in model)
    saved = sum(segment.saved_bytes.at(num_samples) for segment in model.segments)
    workspaces = (
        max(segment.forward_workspace_bytes.at(num_samples), segment.backward_workspace_bytes.at(num_samples))
        for segment in model.segments
    )
    return round(states + saved + max(workspaces))


def _activations(options: Options) -> Sequence[str]:
    """What blocks may do with what they save; where some are named that recompute, they do, and no others."""
    if options.cost_model == "paper":
        return ("keep",)
    return ("keep", "recompute") if options.recomputed else options.search_space.activations


def _check_synchronised_batch_norm(module: nn.Module, device: torch.device) -> None:
    if device.type == "cpu" and any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
        raise ConfigurationError(
            "Expected a GPU for synchronised batch normalisation, got ranks on CPU, where torch.nn.SyncBatchNorm does"
            " not run. Leave out sync_batchnorm=True, or train on GPUs."
        )


def _precision(strategy: Any) -> ComputePrecision:
    config = strategy.mixed_precision_config
    if config is None:
        return ComputePrecision()
    return ComputePrecision(config.param_dtype, tuple(config._module_classes_to_ignore), config.reduce_dtype)
