"""Profile of the model of a Trainer that is about to fit, on a batch of its training data."""

from __future__ import annotations

import copy
import dataclasses
import dis
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.fsdp import _move_torchmetrics_to_device
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_osdp.apply import check_initializable
from lightning_osdp.callbacks.peak import elements_in
from lightning_osdp.core.affine import ZERO
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.progress import Progress
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.profiler import (
    check_parameters,
    empty_cache,
    halves_of,
    is_out_of_memory,
    profile_model,
    resized,
    untouched,
    why_not_mean,
    why_state_differs,
    without_values,
)
from lightning_osdp.profiler.model import NOT_ON_HOST
from lightning_osdp.strategy.batching.first_batch import Peeked, first_batch, longest_batch, samples_given
from lightning_osdp.strategy.batching.loaders import (
    copy_loader,
    loader_size,
    training_loaders,
    unread_loaders,
    why_not_resizable,
    with_batch_size,
)
from lightning_osdp.strategy.checkpointing.averaging import STAY, with_averages
from lightning_osdp.strategy.checkpointing.entries import Resumed
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning.profile_batch import BatchProfiler
from lightning_osdp.strategy.planning.same_training import (
    BatchIndex,
    LoggedReductions,
    PartCollate,
    is_part,
    split_batch,
    why_hooks_count,
)
from lightning_osdp.strategy.planning.training_step import (
    as_in_training,
    as_trained,
    groups_of,
    idle_optimizers,
    in_children,
    make_optimizers,
    names_by_group_of,
    to_device,
    training_step,
)
from lightning_osdp.strategy.runtime.all_ranks import broadcast_value, in_step

_HOOKS_BEFORE_STEPS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")

_FAR = 2
"""Factor by which a micro-batch may differ from the profiled ones before it is profiled itself."""


class FitProfiler:
    """Profiler of the module of a Trainer that is about to fit. All ranks call its methods.

    Attributes:
        loaders: the training loaders; like all attributes, set by `first`.
        peeked: sources of loaders that can be read only once, with the items that were read.
        batch: the profiled batch, on the device.
        num_samples: number of samples in it.
        optimizers: optimizers and schedules of the whole model, which do nothing.
        groups: parameter groups of these optimizers, by names of parameters.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        options: Options,
        progress: Progress,
        resumed: Resumed | None,
    ) -> None:
        self._trainer, self._module, self._options, self._progress = trainer, module, options, progress
        self._loops = {} if resumed is None else resumed.loops
        self._device = trainer.strategy.root_device
        self._is_too_large = False

    def first(self) -> ModelProfile:
        """Profiles a batch of the training data.

        Raises:
            ProfileError: the model or the batch cannot be profiled.
            ConfigurationError: the model cannot be trained on this device, or as shards.
        """
        module = self._module
        if self._device.type == "cpu" and any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
            raise ConfigurationError(
                "Expected a GPU for synchronised batch normalisation, got ranks on CPU, where torch.nn.SyncBatchNorm"
                " does not run. Leave out sync_batchnorm=True, or train on GPUs."
            )
        check_parameters(module)
        check_initializable(module, self._device)
        self.loaders = training_loaders(self._trainer)
        batch, self.peeked = self._read_batch(self.loaders)
        self.num_samples = samples_given(self.loaders, batch, self._options.profile_batch)
        with self._needing_memory():
            self._is_too_large = not all(in_step(self._is_moved, stage="moving the model"))
            if self._is_too_large:
                rank_zero_warn(
                    f"OSDP: {type(module).__name__} does not fit on one device whole, and is profiled by its shapes:"
                    " bytes are as ever, step times those of its operations one by one, which are less true."
                )
                nn.Module.to(module, "cpu")  # LightningModule.to would set self.device, which steps read
            _move_torchmetrics_to_device(module, self._device)  # also where the model is not moved
            self.batch = self._transferred(batch)
            with unread_loaders(self._trainer, self._sized_loaders):
                self.optimizers = idle_optimizers(self._trainer, module)
            self.groups = groups_of(self.optimizers.optimizers, partial(names_by_group_of, module))
            return self._profile(self.batch, self.num_samples)

    def nearer(self, model: ModelProfile, num_samples: int, *, free_bytes: int) -> ModelProfile:
        """Profiles again with a micro-batch of so many samples, if that is far from the profiled ones.

        A profile is linear in the micro-batch, through two measured sizes, and so less accurate far from both. The step
        runs unsharded while it is measured; where the memory is too small for that, the given profile is returned.
        """
        known = model.profiled_batch_size
        is_far = not known / (2 * _FAR) <= num_samples <= known * _FAR
        is_wanted = is_far and unsharded_bytes(model, num_samples) <= free_bytes
        batch = resized(self.batch, self.num_samples, num_samples) if is_wanted else None
        if not all(in_step(lambda: batch is not None, stage="measuring again")):
            return model
        with self._needing_memory():
            return self._profile(batch, num_samples)

    def why_not_mean(self) -> str | None:
        """Says why the loss is not the mean over samples, so that other micro-batches would train differently."""
        for schedule in self.optimizers.schedules:
            if schedule.interval == "step" and schedule.frequency != 1:
                return f"a learning-rate schedule with frequency {schedule.frequency} counts micro-batches"
        module = self._module
        with self._as_in_training(), self._without_values(), self._trainer.precision_plugin.tensor_init_context():
            return why_not_mean(module, training_step(module), self.batch, batch_size=self.num_samples)

    def why_not_same(self) -> str | None:
        """Says why other micro-batches may train differently, by what user code does in each of them."""
        trainer, module = self._trainer, self._module
        reason, logged, index = why_hooks_count(trainer, module), LoggedReductions(), BatchIndex(0)
        if reason is not None:
            return reason
        with self._as_in_training(), trainer.precision_plugin.tensor_init_context():
            vars(module).update(log=logged, log_dict=logged)
            step = training_step(module, index)
            try:
                reason = why_state_differs(module, step, self.batch, batch_size=self.num_samples)
            except Exception:
                if not index.is_read:  # a step that indexes by batch_idx may fail with this index
                    raise
        if index.is_read:
            return "training_step reads batch_idx, which counts micro-batches"
        return logged.why_not or reason or self._why_not_halves()

    def _why_not_halves(self) -> str | None:
        """Says why batches of half the samples are not halves of a batch, such as padding to the longest sample."""
        combined = copy.copy(self.loaders)
        (loader,) = combined.flattened
        size = loader_size(loader)
        assert size is not None
        combined.flattened = [copy_loader(loader, collate_fn=PartCollate(loader.collate_fn, halves_of))]
        batch, _ = first_batch(combined)
        whole, *halves = map(self._transferred, split_batch(batch))
        if all(is_part(whole, half, samples, size) for half, samples in zip(halves, halves_of(size), strict=True)):
            return None
        return "a batch of half the samples is not half of a batch, as where samples are padded to the longest"

    def _as_in_training(self) -> AbstractContextManager[None]:
        return as_in_training(self._trainer, self._module, self._sized_loaders, self.optimizers, self._loops)

    @property
    def _sized_loaders(self) -> CombinedLoader:
        """Training loaders with the micro-batch of ``batch_size``, or the user's own where the plan chooses it."""
        batch_size, loaders = self._options.batch_size, copy.copy(self.loaders)
        if isinstance(batch_size, int) and why_not_resizable(loaders) is None:
            loaders.flattened = [with_batch_size(loader, batch_size) for loader in loaders.flattened]
        return loaders

    def _without_values(self) -> AbstractContextManager[None]:
        """Puts all tensors of the model on meta, if some of them are not on the device."""
        return nullcontext() if self._has_values else without_values(self._module)

    def _transferred(self, batch: Any) -> Any:
        """Moves a batch to the device as for ``training_step``, and restores what transfer hooks change."""
        try:
            with untouched(self._module):
                return to_device(self._trainer, self._module, batch)
        except Exception as error:
            if self._has_values or is_out_of_memory(error):
                raise
            raise ProfileError(
                "Expected the hooks of a batch's transfer to run without the model's tensors, which are not on"
                f" {self._device} while a model on the meta device, or one too large for it, is profiled, but they"
                f" failed: {error!r}. Let them use tensors of the batch alone, do the rest in training_step, or pass"
                " plan=."
            ) from error

    @property
    def _has_values(self) -> bool:
        """True if all tensors of the model are, or can be, on the device."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        return not self._is_too_large and not any(tensor.is_meta for tensor in tensors)

    def _is_moved(self) -> bool:
        """Moves the model to the device; False where there is no room. A model with tensors on meta is not moved."""
        if not self._has_values:
            return True
        try:
            self._module.to(self._device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _read_batch(self, loaders: CombinedLoader) -> tuple[Any, list[Peeked]]:
        """Reads the batch to profile; also gives the sources that can be read only once."""
        profile_batch = self._options.profile_batch
        if profile_batch is None:
            return first_batch(loaders)
        if not isinstance(profile_batch, str):
            return first_batch(loaders, profile_batch) if callable(profile_batch) else (profile_batch, [])
        batch, peeked = first_batch(loaders, longest_batch)
        numbers = in_step(lambda: elements_in(batch), stage="looking for the longest batch")
        return broadcast_value(batch, numbers.index(max(numbers))), peeked

    def _profile(self, batch: Any, num_samples: int) -> ModelProfile:
        trainer, module = self._trainer, self._module
        with self._without_values(), self._as_in_training(), _needing_hooks(module):

            def optimizers(replica: nn.Module) -> Sequence[Optimizer]:
                assert isinstance(replica, pl.LightningModule)
                return make_optimizers(trainer, replica).optimizers

            offers_host = self._options.offers_host_last(self._device)
            profile = profile_model(
                module,
                batch,
                as_trained(trainer, module, optimizers, num_samples),
                **self._options.profiled_choices | ({"on_host": True} if offers_host else {}),
                together=in_step,
                progress=self._progress,
            )
        if not module.automatic_optimization:
            profile = in_children(profile)
        may_exchange = self._options.search_space.may_move or profile.is_plain
        own = {each.operators for each in profile.exchanges} if may_exchange else set[tuple[str, ...]]()
        of_all = set.intersection(*in_step(lambda: own, stage="comparing operators"))  # ranks may run other branches
        exchanges = tuple(each for each in profile.exchanges if each.operators in of_all)
        profile = dataclasses.replace(profile, exchanges=exchanges)
        profile = with_averages(profile, trainer, self._device)
        if not offers_host:
            return profile
        # nobody has asked for states there
        notes = tuple(note for note in profile.notes if note not in {NOT_ON_HOST, STAY})
        return dataclasses.replace(profile, notes=notes)

    def of_later_batches(self, known: ModelProfile, micro_batch_size: int) -> BatchProfiler | None:
        """Profiler of later batches, beside the known ones; None where plans are not to change for these.

        On CPU, without a limit of the user's, what is free only guesses what may be taken.
        """
        trainer, module, options = self._trainer, self._module, self._options
        has_limit = self._device.type == "cuda" or options.memory_limit is not None
        if not (options.longer_batches and has_limit and module.automatic_optimization):
            return None
        sizes = {"num_samples": self.num_samples, "micro_batch_size": micro_batch_size}
        return BatchProfiler(trainer, module, options, known, self.batch, **sizes)

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
            empty_cache(self._device)


@contextmanager
def _needing_hooks(module: pl.LightningModule) -> Iterator[None]:
    """Names the hook in an error for an attribute that a later hook will set."""
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
    code = getattr(getattr(type(module), hook, None), "__code__", None)
    return code is not None and ("STORE_ATTR", name) in ((op.opname, op.argval) for op in dis.get_instructions(code))


def unsharded_bytes(model: ModelProfile, num_samples: int) -> int:
    """Bytes of an unsharded step without optimizer: parameters, gradients, saved activations and a workspace."""
    states = sum(operator.parameter_bytes + operator.trainable_bytes for operator in model)
    saved = model.saved_bytes
    alive = (
        of.at(num_samples)
        for segment in model.segments
        for of in (
            saved + segment.forward_workspace_bytes,
            saved + segment.backward_workspace_bytes,
            segment.ending_bytes or ZERO,
        )
    )
    return round(states + max(alive))
