"""Division of optimizer steps into the micro-batches of a plan, in loaders, Trainer and checkpoints.

A rank has B = b K samples in an optimizer step: K micro-batches of b samples. Another division B = b' K' gives the same
optimizer steps if every window of accumulation has the same samples with the same weights. Lightning weighs each sample
of a micro-batch of s samples by 1 / (K s), in the shorter last window of an epoch too. So the steps are equal if an
epoch has whole micro-batches only, of b and of b' samples. A rank's number of samples in an epoch must be a multiple of
b and of b', but need not be one of B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import BatchSampler, IterableDataset

from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.core.batch_policy import BatchPolicy, samples_of_rank
from lightning_osdp.core.plans.plan import Plan, workload_of
from lightning_osdp.core.step import Workload
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.batching.first_batch import Peeked, reread_loader
from lightning_osdp.strategy.batching.loaders import (
    FixedLoaderError,
    batches_in_order,
    common_size,
    forget_loaders,
    loader_size,
    samples_per_rank,
    training_loaders,
    why_not_resizable,
    with_batch_size,
)
from lightning_osdp.strategy.checkpointing.entries import store_division
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.runtime.all_ranks import all_gather_values

_COUNTS = ("limit_train_batches", "overfit_batches", "val_check_interval")
"""Options of the Trainer that count micro-batches as whole numbers; as floats they are fractions of an epoch."""


@dataclass(frozen=True)
class Windows:
    """Windows of accumulation as the user gave them: b samples, K times, and options that count micro-batches."""

    micro_batch_size: int
    """b: samples of a batch of the user's loaders."""
    num_micro_batches: int
    """K: micro-batches of an optimizer step."""
    num_samples: int
    """B: samples of one rank in an optimizer step."""
    counts: Mapping[str, Any]
    """Options of the Trainer that count micro-batches, by name."""

    @classmethod
    def of(cls, trainer: pl.Trainer, *, micro_batch_size: int, num_samples: int) -> Windows:
        """Reads the windows of a Trainer."""
        counts = {name: getattr(trainer, name, None) for name in _COUNTS}
        return cls(micro_batch_size, trainer.accumulate_grad_batches, num_samples, counts)

    def matches(self, trainer: pl.Trainer) -> bool:
        """Tells whether this Trainer has the same options; 1, one micro-batch, differs from 1.0, a whole epoch."""
        counts = [(getattr(trainer, name, None), count) for name, count in self.counts.items()]
        are_same = all(given == count and (not count or type(given) is type(count)) for given, count in counts)
        return are_same and trainer.accumulate_grad_batches == self.num_micro_batches

    def counts_for(self, micro_batch_size: int) -> dict[str, Any]:
        """Converts the options that count micro-batches to another size; fractions stay."""
        factor = Fraction(self.micro_batch_size, micro_batch_size)
        return {
            name: math.ceil(value * factor) if isinstance(value, int) else value for name, value in self.counts.items()
        }

    @property
    def workload(self) -> Workload:
        """Micro-batches as the user gave them."""
        return Workload(micro_batch_size=self.micro_batch_size, num_micro_batches=self.num_micro_batches)

    def divide(self, trainer: pl.Trainer, workload: Workload) -> None:
        """Has the Trainer accumulate and count in other micro-batches."""
        trainer.accumulate_grad_batches = workload.num_micro_batches
        for name, value in self.counts_for(workload.micro_batch_size).items():
            setattr(trainer, name, value)


@dataclass
class Division:
    """Micro-batches in use by the loaders and Trainers of one strategy."""

    workload: Workload | None = None
    """Micro-batches in use; None: loaders and Trainer keep their own."""
    windows: Windows | None = None
    """The user's own windows, where their samples may be divided in another way; None where they may not."""
    sizes: Sequence[int] = ()
    """Micro-batch sizes that may be chosen for these windows."""
    peeked: Sequence[Peeked] = ()
    """Sources of loaders that can be read only once, and that profiling has read from."""
    is_scaled: bool = False
    """True with ``batch_size="scale"``, where the micro-batch decides how many samples an optimizer step has."""
    _trainer: pl.Trainer | None = None

    def begin(self, trainer: pl.Trainer) -> None:
        """Begins a fit: the Trainer accumulates and counts in the micro-batches in use."""
        if self.windows is None or self._trainer is trainer:
            return
        if not self.windows.matches(trainer):
            rank_zero_warn(
                "OSDP: this Trainer counts or accumulates micro-batches in another way than the one that the plan was"
                " made under, so it keeps its own."
            )
            self.workload = self.windows = None
            return
        assert self.workload is not None
        self._trainer = trainer
        self._use(trainer, self.workload)

    def end(self, trainer: pl.Trainer) -> None:
        """Restores the Trainer's own options, before a fit of another model is planned."""
        windows, used = self.windows, self.workload
        if windows is None or used is None or self._trainer is not trainer:
            return
        if trainer.accumulate_grad_batches == used.num_micro_batches:  # the user has not changed it since
            windows.divide(trainer, windows.workload)

    @contextmanager
    def as_given(self, trainer: pl.Trainer) -> Iterator[None]:
        """Has the Trainer count micro-batches of the user's own loaders, for code of the user that reads counts."""
        windows, used = self.windows, self.workload
        if windows is None or used is None or windows.num_samples % windows.micro_batch_size:
            yield
            return
        size = windows.micro_batch_size
        self._use(trainer, Workload(micro_batch_size=size, num_micro_batches=windows.num_samples // size))
        try:
            yield
        finally:
            self._use(trainer, used)
            if size != used.micro_batch_size:
                forget_loaders(trainer)  # a read of estimated_stepping_batches has built them with the other size

    def resume(self, trainer: pl.Trainer, saved: Workload | None) -> None:
        """Resumes a fit from a checkpoint whose progress is counted in ``saved`` micro-batches.

        Loaders are built again, because the checkpoint has states of loaders and of generators that they draw from.

        Raises:
            ConfigurationError: the checkpoint counts in other micro-batches than the plan's.
        """
        if not self.peeked:
            forget_loaders(trainer)
        resumed, used = self.resumed(saved), self.workload
        if used is not None and resumed not in (None, used):
            raise ConfigurationError(
                f"Expected the checkpoint's {division_text(resumed)} to be planned for, but this run has"
                f" {division_text(used)}. Pass the checkpoint to Trainer.fit as ckpt_path."
            )

    def resumed(self, saved: Workload | None) -> Workload | None:
        """Micro-batches of the run to resume; None where they make other optimizer steps than this run's windows."""
        if self.windows is None:
            return None
        workload = self.windows.workload if saved is None else saved
        is_possible = workload.micro_batch_size in self.sizes and workload.num_samples == self.windows.num_samples
        return workload if is_possible else None

    @property
    def smaller(self) -> Workload | None:
        """Next smaller micro-batches of the same optimizer steps; None if there are none."""
        if self.windows is None or self.workload is None:
            return None
        size = max((size for size in self.sizes if size < self.workload.micro_batch_size), default=None)
        samples = self.workload.num_samples
        return None if size is None else Workload(micro_batch_size=size, num_micro_batches=samples // size)

    def divide(self, trainer: pl.Trainer, workload: Workload) -> None:
        """Changes to other micro-batches before the first step, and builds the loaders again."""
        self._use(trainer, workload)
        forget_loaders(trainer)
        trainer.fit_loop.setup_data()

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Writes the micro-batches in use into a checkpoint, unless they are those of the user's own loaders."""
        if self.workload is not None and (self.windows is not None or self.is_scaled):
            store_division(self.workload, checkpoint)

    def loader(self, loader: object) -> object:
        """Gives a training loader the micro-batch size in use, and the items that profiling has read from it."""
        size = None if self.workload is None else self.workload.micro_batch_size
        user_size = None if self.windows is None else self.windows.micro_batch_size
        if size is not None and size not in (user_size, loader_size(loader)):
            try:
                loader = with_batch_size(loader, size)
            except FixedLoaderError as error:
                rank_zero_warn(f"OSDP: the plan's micro-batch is {size}, but the loader keeps its own: {error}.")
        for peeked in self.peeked:
            if peeked.source is loader or peeked.source is getattr(loader, "dataset", None):
                return reread_loader(loader, peeked)
        return loader

    def _use(self, trainer: pl.Trainer, workload: Workload) -> None:
        assert self.windows is not None
        self.workload = workload
        self.windows.divide(trainer, workload)


def division_text(workload: Workload | None) -> str:
    """Formats samples and number of micro-batches."""
    assert workload is not None
    return f"{workload.micro_batch_size} samples x {workload.num_micro_batches} micro-batches"


def allowed_micro_batches(
    trainer: pl.Trainer, options: Options, loaders: CombinedLoader, current: int, why_not_mean: Callable[[], str | None]
) -> tuple[BatchPolicy, Windows | None]:
    """Micro-batches that a plan may have, on all ranks alike; says why where they are fewer than was asked for.

    Args:
        trainer: the Trainer that is about to fit.
        options: the options ``batch_size`` and ``global_batch_size`` are read.
        loaders: the training loaders, whose batches have ``current`` samples.
        current: samples of a batch of the user's loaders.
        why_not_mean: tells why the loss of a micro-batch is not the mean over its samples; runs on all ranks or none.

    Returns:
        Sizes, the user's own first; and the user's windows, if the Trainer's number of micro-batches may change.

    Raises:
        ConfigurationError: ``batch_size`` or ``global_batch_size`` is impossible with these loaders.
    """
    number, batch_size, world_size = trainer.accumulate_grad_batches, options.batch_size, trainer.world_size
    num_samples = samples_per_step(trainer, options, current)
    if batch_size in ("auto", "divide"):
        windows = Windows.of(trainer, micro_batch_size=current, num_samples=num_samples)
        sizes, reason = divisions(trainer, loaders, windows, why_not_mean)
        if reason is not None:
            _check_divides(current, num_samples, world_size, reason)
            if num_samples > 1:
                rank_zero_info(f"OSDP: micro-batches stay {current} x {num_samples // current}: {reason}.")
        return BatchPolicy.divide(num_samples, sizes), windows
    reason = None if batch_size in ("keep", current) else why_not_resizable(loaders)
    if reason is not None:
        rank_zero_warn(f"OSDP: batch_size={batch_size!r} is ignored, the loader keeps {current}: {reason}.")
    elif batch_size == "scale":
        return BatchPolicy.scale(samples_per_rank(loaders, world_size=world_size), number), None
    size = batch_size if isinstance(batch_size, int) and reason is None else current
    if size != current:
        most = samples_per_rank(loaders, world_size=world_size)
        if most is not None and size > most:
            raise ConfigurationError(
                f"Expected a batch_size of which each of {world_size} ranks has at least one, got {size}: the training"
                f" data have {most} samples for a rank. Use at most {most}."
            )
    if options.global_batch_size is None:
        return BatchPolicy.fixed(size, number), None
    _check_divides(size, num_samples, world_size, reason)
    return BatchPolicy.divide(num_samples, (size,)), Windows(current, number, num_samples, {})


def user_policy(policy: BatchPolicy, current: int, world_size: int, reason: str) -> BatchPolicy:
    """Narrows a policy to the user's own size, for this reason.

    Raises:
        ConfigurationError: that size does not divide ``global_batch_size``.
    """
    assert policy.num_samples is not None
    _check_divides(current, policy.num_samples, world_size, reason)
    return BatchPolicy.divide(policy.num_samples, (current,))


def check_agrees(plan: Plan, options: Options) -> None:
    """Raises a `ConfigurationError` if a plan contradicts ``batch_size`` or ``global_batch_size``."""
    size, num_samples = plan.micro_batch_size, workload_of(plan).num_samples
    if isinstance(options.batch_size, int) and options.batch_size != size:
        raise ConfigurationError(
            f"Expected batch_size and plan to agree, got batch_size={options.batch_size} and a plan for a micro-batch"
            f" of {size}. Leave batch_size out, or plan anew by leaving out plan."
        )
    if options.global_batch_size not in (None, num_samples * plan.world_size):
        raise ConfigurationError(
            f"Expected global_batch_size and plan to agree, got global_batch_size={options.global_batch_size} and a"
            f" plan for {num_samples * plan.world_size} samples: {plan.num_micro_batches} micro-batches of {size} on"
            f" each of {plan.world_size} ranks. Leave global_batch_size out, or plan anew by leaving out plan."
        )


def division_of_plan(trainer: pl.Trainer, plan: Plan, options: Options) -> tuple[Division, Workload]:
    """Division for a plan made before this fit, as far as the user's loaders allow, and the micro-batches in use.

    If the plan's micro-batches make the user's optimizer steps, the Trainer gets the plan's number of them, too.
    """
    size, num_samples = plan.micro_batch_size, workload_of(plan).num_samples
    if trainer.state.fn != TrainerFn.FITTING or not trainer.fit_loop._data_source.is_defined():
        return Division(), workload_of(plan)
    loaders = training_loaders(trainer)
    current, reason = common_size(loaders), why_not_resizable(loaders)
    resized = replace(workload_of(plan), num_micro_batches=trainer.accumulate_grad_batches)
    user_workload = resized if current is None else replace(resized, micro_batch_size=current)
    if options.batch_size == "keep":
        return Division(), user_workload
    if reason is None and current is not None and samples_per_step(trainer, options, current) == num_samples:
        windows = Windows.of(trainer, micro_batch_size=current, num_samples=num_samples)
        sizes, reason = divisions(trainer, loaders, windows)
        if size in sizes:
            return Division(workload_of(plan), windows, sizes), workload_of(plan)
        reason = reason or f"in micro-batches of {size} an epoch does not have the same windows"
    if reason is not None and current != size:
        rank_zero_warn(f"OSDP: the plan's micro-batch is {size}, but loaders keep theirs: {reason}.")
    # a plan that was not given by plan= was made for other optimizer steps than the user has now
    if reason is not None or current == size or (options.plan is None and options.batch_size == "auto"):
        return Division(), user_workload
    return Division(resized, is_scaled=options.batch_size == "scale"), resized


def divisions(
    trainer: pl.Trainer,
    loaders: CombinedLoader,
    windows: Windows,
    why_not_mean: Callable[[], str | None] = lambda: None,
) -> tuple[tuple[int, ...], str | None]:
    """Sizes that make the user's optimizer steps, the user's first; and why there is no other, if there is none."""
    user_size = windows.micro_batch_size
    reason = first_text(why_not_divided(trainer, loaders, windows)) or first_text(why_not_mean())
    if reason is not None:
        return (user_size,), reason
    sizes = set.intersection(*map(set, all_gather_values(possible_sizes(loaders, windows))))
    if not sizes - {user_size}:
        reason = f"no other size divides {windows.num_samples} samples and gives every epoch the same windows"
        return (user_size,), reason
    return tuple(sorted(sizes, key=lambda size: (size != user_size, size))), None


def samples_per_step(trainer: pl.Trainer, options: Options, current: int) -> int:
    """Samples of one rank in an optimizer step of the user (B), if loaders give batches of ``current`` samples.

    Raises:
        ConfigurationError: ``global_batch_size`` contradicts the Trainer's accumulation, or ranks cannot share it.
    """
    number, expected = trainer.accumulate_grad_batches, options.global_batch_size
    if expected is None:
        return current * number
    num_samples = samples_of_rank(expected, trainer.world_size, name="global_batch_size")
    actual = current * number * trainer.world_size
    if number > 1 and actual != expected:
        raise ConfigurationError(
            f"Expected global_batch_size={expected}, but batches of {current} with accumulate_grad_batches={number} on"
            f" {trainer.world_size} ranks are {actual} samples. Leave out one of the two."
        )
    return num_samples


def _check_divides(size: int, num_samples: int, world_size: int, reason: str | None) -> None:
    if num_samples % size:
        why = f" ({reason})" if reason else ""
        raise ConfigurationError(
            f"Expected micro-batches that divide global_batch_size={num_samples * world_size}, which is {num_samples}"
            f" samples a rank, got {size}{why}. Let the loader give a divisor of it."
        )


def first_text(text: str | None) -> str | None:
    """Gives all ranks the text of the first rank that has one."""
    return next((sent for sent in all_gather_values(text) if sent is not None), None)


def why_not_divided(trainer: pl.Trainer, loaders: CombinedLoader, windows: Windows) -> str | None:
    """Says why the user's windows must stay divided as they are; None if the loaders allow other micro-batches."""
    return next(_obstacles(trainer, loaders, windows), None)


def _obstacles(trainer: pl.Trainer, loaders: CombinedLoader, windows: Windows) -> Iterator[str]:
    """Yields reasons against another division; code after a yield relies on that reason not being there."""
    if callbacks_of(trainer, GradientAccumulationScheduler):
        yield "a GradientAccumulationScheduler changes the number of micro-batches"
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
        yield "fast_dev_run counts micro-batches"
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]  # set by a connector
        yield "loaders that are reloaded may have another length"
    if len(loaders.flattened) != 1:
        yield f"{len(loaders.flattened)} loaders are combined micro-batch by micro-batch"
    reason = why_not_resizable(loaders)
    if reason is not None:
        yield reason
    (loader,) = loaders.flattened
    name = type(loader).__name__
    if isinstance(loader.dataset, IterableDataset):
        yield f"{name} reads an iterable dataset, whose end nobody knows"
    if not batches_in_order(loader) or sized_len(loader.batch_sampler.sampler) is None:
        yield f"{name} does not take one sample after the other from a sampler with a length"
    size, num_samples = windows.micro_batch_size, len(loader.batch_sampler.sampler)
    if _num_batches(loader.batch_sampler, windows, size) * size > num_samples:
        yield f"the last micro-batch of an epoch has {num_samples % size} samples, which Lightning weighs like {size}"


def possible_sizes(loaders: CombinedLoader, windows: Windows) -> tuple[int, ...]:
    """Micro-batch sizes b' that divide B and give the same windows and validations; needs `why_not_divided` is None."""
    sampler = loaders.flattened[0].batch_sampler
    most = min(windows.num_samples, max(windows.micro_batch_size, len(sampler.sampler)))
    divisors = [size for size in range(1, most + 1) if windows.num_samples % size == 0]
    return tuple(size for size in divisors if _has_same_windows(sampler, windows, size))


def _num_batches(sampler: BatchSampler, windows: Windows, size: int) -> int:
    """Number of micro-batches of this size in an epoch of one rank, within ``limit_train_batches``."""
    num_samples = len(sampler.sampler)  # type: ignore[arg-type]  # it has a length
    length = num_samples // size if sampler.drop_last else math.ceil(num_samples / size)
    try:
        return int(_parse_num_batches(RunningStage.TRAINING, length, windows.counts_for(size)["limit_train_batches"]))
    except MisconfigurationException:  # ``limit_train_batches`` is a fraction of less than one micro-batch
        return 0


def _has_same_windows(sampler: BatchSampler, windows: Windows, size: int) -> bool:
    """Tells whether epochs in micro-batches of this size have the same windows and validations."""
    user_size, interval = windows.micro_batch_size, windows.counts["val_check_interval"]
    number, user_number = _num_batches(sampler, windows, size), _num_batches(sampler, windows, user_size)
    if number * size != user_number * user_size:
        return False
    if isinstance(interval, int):
        return interval * user_size % size == 0
    if isinstance(interval, float):
        return max(1, int(number * interval)) * size == max(1, int(user_number * interval)) * user_size
    return True  # validation after some time, or none
