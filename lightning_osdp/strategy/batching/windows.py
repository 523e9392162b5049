"""How the samples of one rank and optimizer step are divided into micro-batches: as the user has it, or another way.

With B = b K samples, another way b' K' = B gives the same optimizer steps wherever every window of accumulation holds
the same samples with the same weights. Lightning weighs a micro-batch of s samples by 1 / (K s) per sample, in the
shorter last window of an epoch too. So all is equal if an epoch has whole micro-batches only, of b and of b' samples:
its number of samples on a rank must be a multiple of both, but not of B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, IterableDataset

from lightning_osdp.strategy.batching.loaders import why_kept
from lightning_osdp.strategy.batching.rebuild import batches_in_order

_COUNTS = ("limit_train_batches", "overfit_batches", "val_check_interval")
"""Options of the Trainer that count micro-batches where they are whole numbers, and are fractions otherwise."""


@dataclass(frozen=True)
class Windows:
    """What the Trainer was given: b samples, K times, and what it counts in micro-batches."""

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

    def are_of(self, trainer: pl.Trainer) -> bool:
        """Whether this Trainer was given the same."""
        counts = {name: getattr(trainer, name, None) for name in self.counts}
        return trainer.accumulate_grad_batches == self.num_micro_batches and counts == self.counts

    def counted(self, micro_batch_size: int) -> dict[str, Any]:
        """The options that count micro-batches, of another size; fractions as they are."""
        factor = Fraction(self.micro_batch_size, micro_batch_size)
        return {
            name: math.ceil(value * factor) if isinstance(value, int) else value for name, value in self.counts.items()
        }

    def divide(self, trainer: pl.Trainer, *, micro_batch_size: int, num_micro_batches: int) -> None:
        """Tells the Trainer of another division: from now on it accumulates and counts accordingly."""
        trainer.accumulate_grad_batches = num_micro_batches
        for name, value in self.counted(micro_batch_size).items():
            setattr(trainer, name, value)


def why_not_divided(trainer: pl.Trainer, loaders: CombinedLoader, windows: Windows) -> str | None:
    """Why the user's micro-batches cannot be divided in another way; None if what the loaders give allows it."""
    return next(_obstacles(trainer, loaders, windows), None)


def _obstacles(trainer: pl.Trainer, loaders: CombinedLoader, windows: Windows) -> Iterator[str]:
    """What speaks against it; each only holds where those before it were not found."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
        yield "a GradientAccumulationScheduler changes the number of micro-batches"
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
        yield "fast_dev_run counts micro-batches"
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]  # set by a connector
        yield "loaders that are reloaded may have another length"
    if len(loaders.flattened) != 1:
        yield f"{len(loaders.flattened)} loaders are combined micro-batch by micro-batch"
    reason = why_kept(loaders)
    if reason is not None:
        yield reason
    (loader,) = loaders.flattened
    name = type(loader).__name__
    if isinstance(loader.dataset, IterableDataset):
        yield f"{name} reads an iterable dataset, whose end nobody knows"
    if not batches_in_order(loader) or sized_len(loader.batch_sampler.sampler) is None:
        yield f"{name} does not take one sample after the other from a sampler with a length"
    size, num_samples = windows.micro_batch_size, len(loader.batch_sampler.sampler)
    if _Epoch(loader, windows).num_batches(size) * size > num_samples:
        yield f"the last micro-batch of an epoch has {num_samples % size} samples, which Lightning weighs like {size}"


def possible_sizes(loaders: CombinedLoader, windows: Windows) -> tuple[int, ...]:
    """Micro-batches b' that divide B and give an epoch the same windows, validated after the same samples.

    Args:
        loaders: for which `why_not_divided` has no reason.
        windows: the user's.
    """
    epoch = _Epoch(loaders.flattened[0], windows)
    most = min(windows.num_samples, max(windows.micro_batch_size, epoch.num_samples))
    divisors = [size for size in range(1, most + 1) if windows.num_samples % size == 0]
    return tuple(size for size in divisors if epoch.is_same_in(size))


class _Epoch:
    """One epoch of a rank, in micro-batches of any size."""

    def __init__(self, loader: Any, windows: Windows) -> None:
        batch_sampler: BatchSampler = loader.batch_sampler
        self.num_samples = len(batch_sampler.sampler)  # type: ignore[arg-type]  # it has a length
        self._drops_last, self._windows = batch_sampler.drop_last, windows

    def num_batches(self, size: int) -> int:
        """As Lightning limits them."""
        length = self.num_samples // size if self._drops_last else math.ceil(self.num_samples / size)
        limit = self._windows.counted(size)["limit_train_batches"]
        try:
            return int(_parse_num_batches(RunningStage.TRAINING, length, limit))
        except MisconfigurationException:  # a fraction of less than one of them
            return 0

    def is_same_in(self, size: int) -> bool:
        """Whether micro-batches of this size give the same windows."""
        own = self._windows.micro_batch_size
        batches, own_batches = self.num_batches(size), self.num_batches(own)
        if batches * size != own_batches * own:
            return False
        interval = self._windows.counts["val_check_interval"]
        if isinstance(interval, int):
            return interval * own % size == 0
        if not isinstance(interval, float):
            return True
        return max(1, int(batches * interval)) * size == max(1, int(own_batches * interval)) * own
