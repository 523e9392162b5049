"""Optimizer steps in the micro-batches of a plan: what loaders, Trainer and checkpoints are told of them.

With B = b K samples of a rank, another way b' K' = B gives the same optimizer steps wherever every window of
accumulation holds the same samples with the same weights. Lightning weighs a micro-batch of s samples by 1 / (K s) per
sample, in the shorter last window of an epoch too. So all is equal if an epoch has whole micro-batches only, of b and
of b' samples: its number of samples on a rank must be a multiple of both, but not of B.
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
"""Options of the Trainer that count micro-batches where they are whole numbers, and are fractions otherwise."""


@dataclass(frozen=True)
class Windows:
    """The user's own division: b samples, K times, and the Trainer's options that count micro-batches."""

    micro_batch_size: int
    """What loaders give."""
    num_micro_batches: int
    num_samples: int
    """B: samples of one rank in an optimizer step."""
    counts: Mapping[str, Any]

    @classmethod
    def of(cls, trainer: pl.Trainer, *, micro_batch_size: int, num_samples: int) -> Windows:
        """Those of a Trainer."""
        counts = {name: getattr(trainer, name, None) for name in _COUNTS}
        return cls(micro_batch_size, trainer.accumulate_grad_batches, num_samples, counts)

    def matches(self, trainer: pl.Trainer) -> bool:
        """Whether this Trainer was given the same; 1, a micro-batch, is not 1.0, all of them."""
        counts = [(getattr(trainer, name, None), own) for name, own in self.counts.items()]
        are_same = all(given == own and (not own or type(given) is type(own)) for given, own in counts)
        return are_same and trainer.accumulate_grad_batches == self.num_micro_batches

    def counts_for(self, micro_batch_size: int) -> dict[str, Any]:
        """The options that count micro-batches, of another size; fractions as they are."""
        factor = Fraction(self.micro_batch_size, micro_batch_size)
        return {
            name: math.ceil(value * factor) if isinstance(value, int) else value for name, value in self.counts.items()
        }

    @property
    def workload(self) -> Workload:
        """What the Trainer was given."""
        return Workload(micro_batch_size=self.micro_batch_size, num_micro_batches=self.num_micro_batches)

    def divide(self, trainer: pl.Trainer, workload: Workload) -> None:
        """Tells the Trainer of another division: from now on it accumulates and counts accordingly."""
        trainer.accumulate_grad_batches = workload.num_micro_batches
        for name, value in self.counts_for(workload.micro_batch_size).items():
            setattr(trainer, name, value)


@dataclass
class Division:
    """How the loaders and Trainers of one strategy come to the micro-batches of a plan."""

    workload: Workload | None = None
    """In which training goes on; None: loaders and Trainer keep theirs."""
    windows: Windows | None = None
    """What the user has, where the same samples may be divided in another way; None where they may not."""
    sizes: Sequence[int] = ()
    """Micro-batches that may be chosen then."""
    peeked: Sequence[Peeked] = ()
    """Sources of loaders that profiling read from, and that can be read only once."""
    is_scaled: bool = False
    """Whether the micro-batch is the fastest of any size, so that optimizer steps have as many samples."""
    _trainer: pl.Trainer | None = None

    def begin(self, trainer: pl.Trainer) -> None:
        """A fit begins."""
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
        """Gives the Trainer back what it had, before a fit of another model is planned."""
        own, used = self.windows, self.workload
        if own is None or used is None or self._trainer is not trainer:
            return
        if trainer.accumulate_grad_batches == used.num_micro_batches:  # nobody has changed it since
            own.divide(trainer, own.workload)

    @contextmanager
    def as_given(self, trainer: pl.Trainer) -> Iterator[None]:
        """Within it, the Trainer counts micro-batches of the user's own loaders, as code of the user's may do, too."""
        own, used = self.windows, self.workload
        if own is None or used is None or own.num_samples % own.micro_batch_size:
            yield
            return
        size = own.micro_batch_size
        self._use(trainer, Workload(micro_batch_size=size, num_micro_batches=own.num_samples // size))
        try:
            yield
        finally:
            self._use(trainer, used)
            if size != used.micro_batch_size:
                forget_loaders(trainer)  # of which somebody may have asked for the length

    def resume(self, trainer: pl.Trainer, saved: Workload | None) -> None:
        """A fit goes on from a checkpoint, whose progress is counted in these micro-batches.

        Loaders are made anew, for they have states in the checkpoint, and draw from generators that it has. Raises a
        `ConfigurationError` if the checkpoint counts in others than those that were planned for.
        """
        if not self.peeked:
            forget_loaders(trainer)
        wanted, used = self.resumed(saved), self.workload
        if used is not None and wanted not in (None, used):
            raise ConfigurationError(
                f"Expected the checkpoint's {division_text(wanted)} to be planned for, but this run has"
                f" {division_text(used)}. Pass the checkpoint to Trainer.fit as ckpt_path."
            )

    def resumed(self, saved: Workload | None) -> Workload | None:
        """What a run that is resumed goes on in; None where this is not said by the checkpoint's micro-batches."""
        if self.windows is None:
            return None
        found = self.windows.workload if saved is None else saved
        is_possible = found.micro_batch_size in self.sizes and found.num_samples == self.windows.num_samples
        return found if is_possible else None

    @property
    def smaller(self) -> Workload | None:
        """The next smaller micro-batches of the same optimizer steps, if there are any."""
        if self.windows is None or self.workload is None:
            return None
        size = max((size for size in self.sizes if size < self.workload.micro_batch_size), default=None)
        samples = self.workload.num_samples
        return None if size is None else Workload(micro_batch_size=size, num_micro_batches=samples // size)

    def divide(self, trainer: pl.Trainer, workload: Workload) -> None:
        """Changes to other micro-batches before the first step; loaders are made anew."""
        self._use(trainer, workload)
        forget_loaders(trainer)
        trainer.fit_loop.setup_data()

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Writes the division in use into a checkpoint."""
        if self.workload is not None and (self.windows is not None or self.is_scaled):
            store_division(self.workload, checkpoint)

    def loader(self, loader: object) -> object:
        """The loader to train on."""
        own = None if self.windows is None else self.windows.micro_batch_size
        if self.workload is not None and self.workload.micro_batch_size not in (own, loader_size(loader)):
            size = self.workload.micro_batch_size
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
    """Samples and number of micro-batches as text."""
    assert workload is not None
    return f"{workload.micro_batch_size} samples x {workload.num_micro_batches} micro-batches"


def allowed_micro_batches(
    trainer: pl.Trainer, options: Options, loaders: CombinedLoader, current: int, why_not_mean: Callable[[], str | None]
) -> tuple[BatchPolicy, Windows | None]:
    """What may be chosen, the user's own size first; and what the user has, if the Trainer's number may change, too.

    The same on all ranks. Says why where it is less than was asked for. ``why_not_mean`` tells why the loss of a
    micro-batch is not the mean over its samples, and is called on all ranks or none. Raises a `ConfigurationError` if
    ``batch_size`` or ``global_batch_size`` cannot be had.
    """
    number, wanted, world_size = trainer.accumulate_grad_batches, options.batch_size, trainer.world_size
    num_samples = samples_per_step(trainer, options, current)
    if wanted in ("auto", "divide"):
        windows = Windows.of(trainer, micro_batch_size=current, num_samples=num_samples)
        sizes, reason = divisions(trainer, loaders, windows, why_not_mean)
        if reason is not None:
            _check_divides(current, num_samples, world_size, reason)
            if num_samples > 1:
                rank_zero_info(f"OSDP: micro-batches stay {current} x {num_samples // current}: {reason}.")
        return BatchPolicy.divide(num_samples, sizes), windows
    reason = None if wanted in ("keep", current) else why_not_resizable(loaders)
    if reason is not None:
        rank_zero_warn(f"OSDP: batch_size={wanted!r} is ignored, the loader keeps {current}: {reason}.")
    elif wanted == "scale":
        return BatchPolicy.scale(samples_per_rank(loaders, world_size=world_size), number), None
    size = wanted if isinstance(wanted, int) and reason is None else current
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
    """The user's own size alone, for this reason, of those that a policy allows.

    Raises a `ConfigurationError` if it does not divide ``global_batch_size``.
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
    """Micro-batches of a plan that was there before, as far as the user's loaders can give them; and those trained in.

    Where they make up the optimizer step that the user wants, the Trainer gets the plan's number of them, too.
    """
    size, num_samples = plan.micro_batch_size, workload_of(plan).num_samples
    if trainer.state.fn != TrainerFn.FITTING or not trainer.fit_loop._data_source.is_defined():
        return Division(), workload_of(plan)
    loaders = training_loaders(trainer)
    current, reason = common_size(loaders), why_not_resizable(loaders)
    own = replace(workload_of(plan), num_micro_batches=trainer.accumulate_grad_batches)
    kept = own if current is None else replace(own, micro_batch_size=current)
    if options.batch_size == "keep":
        return Division(), kept
    if reason is None and current is not None and samples_per_step(trainer, options, current) == num_samples:
        windows = Windows.of(trainer, micro_batch_size=current, num_samples=num_samples)
        sizes, reason = divisions(trainer, loaders, windows)
        if size in sizes:
            return Division(workload_of(plan), windows, sizes), workload_of(plan)
        reason = reason or f"in micro-batches of {size} an epoch does not have the same windows"
    if reason is not None and current != size:
        rank_zero_warn(f"OSDP: the plan's micro-batch is {size}, but loaders keep theirs: {reason}.")
    # without plan= it was made for other optimizer steps than those that the user has now
    if reason is not None or current == size or (options.plan is None and options.batch_size == "auto"):
        return Division(), kept
    return Division(own, is_scaled=options.batch_size == "scale"), own


def divisions(
    trainer: pl.Trainer,
    loaders: CombinedLoader,
    windows: Windows,
    why_not_mean: Callable[[], str | None] = lambda: None,
) -> tuple[tuple[int, ...], str | None]:
    """Sizes that make up the user's optimizer steps, on all ranks alike; and why there is none but the user's own."""
    own = windows.micro_batch_size
    reason = first_text(why_not_divided(trainer, loaders, windows)) or first_text(why_not_mean())
    if reason is not None:
        return (own,), reason
    sizes = set.intersection(*map(set, all_gather_values(possible_sizes(loaders, windows))))
    if not sizes - {own}:
        return (own,), f"no other size divides {windows.num_samples} samples and gives every epoch the same windows"
    return tuple(sorted(sizes, key=lambda size: (size != own, size))), None


def samples_per_step(trainer: pl.Trainer, options: Options, current: int) -> int:
    """B: samples of one rank in the optimizer step that the user wants, whose loaders give `current` at once.

    Raises:
        ConfigurationError: ``global_batch_size`` contradicts what the Trainer accumulates, or ranks cannot share it.
    """
    number, wanted = trainer.accumulate_grad_batches, options.global_batch_size
    if wanted is None:
        return current * number
    num_samples = samples_of_rank(wanted, trainer.world_size, name="global_batch_size")
    found = current * number * trainer.world_size
    if number > 1 and found != wanted:
        raise ConfigurationError(
            f"Expected global_batch_size={wanted}, but batches of {current} with accumulate_grad_batches={number} on"
            f" {trainer.world_size} ranks are {found} samples. Leave out one of the two."
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
    """The text of the first rank that has one."""
    return next((each for each in all_gather_values(text) if each is not None), None)


def why_not_divided(trainer: pl.Trainer, loaders: CombinedLoader, windows: Windows) -> str | None:
    """Why the user's micro-batches cannot be divided in another way; None if what the loaders give allows it."""
    return next(_obstacles(trainer, loaders, windows), None)


def _obstacles(trainer: pl.Trainer, loaders: CombinedLoader, windows: Windows) -> Iterator[str]:
    """Reasons against it; each holds only if none before it does."""
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
    """Micro-batches b' that divide B, with the same windows and validations, where `why_not_divided` has no reason."""
    sampler = loaders.flattened[0].batch_sampler
    most = min(windows.num_samples, max(windows.micro_batch_size, len(sampler.sampler)))
    divisors = [size for size in range(1, most + 1) if windows.num_samples % size == 0]
    return tuple(size for size in divisors if _has_same_windows(sampler, windows, size))


def _num_batches(sampler: BatchSampler, windows: Windows, size: int) -> int:
    """Micro-batches of this size in an epoch of one rank, as Lightning limits them."""
    num_samples = len(sampler.sampler)  # type: ignore[arg-type]  # it has a length
    length = num_samples // size if sampler.drop_last else math.ceil(num_samples / size)
    try:
        return int(_parse_num_batches(RunningStage.TRAINING, length, windows.counts_for(size)["limit_train_batches"]))
    except MisconfigurationException:  # a fraction of less than one of them
        return 0


def _has_same_windows(sampler: BatchSampler, windows: Windows, size: int) -> bool:
    """Whether an epoch has the same windows in micro-batches of this size, and is validated after the same samples."""
    own, interval = windows.micro_batch_size, windows.counts["val_check_interval"]
    batches, own_batches = _num_batches(sampler, windows, size), _num_batches(sampler, windows, own)
    if batches * size != own_batches * own:
        return False
    if isinstance(interval, int):
        return interval * own % size == 0
    return (
        not isinstance(interval, float)
        or max(1, int(batches * interval)) * size == max(1, int(own_batches * interval)) * own
    )
