"""The training loaders: one batch of them to profile on, and what becomes of them under the plan."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.connectors.data_connector import (
    _process_dataloader,
    _request_dataloader,
    _resolve_overfit_batches,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader

from lightning_osdp.errors import ProfileError
from lightning_osdp.strategy.batching.read_once import Peeked, read_once_source, reading
from lightning_osdp.strategy.batching.rebuild import copy_of, loader_size, why_fixed, with_batch_size


@dataclass(frozen=True)
class LoaderChange:
    """What becomes of each training loader.

    Attributes:
        batch_size: what to rebuild it with; None to keep its own.
        peeked: sources that profiling read from, and that can be read only once.
    """

    batch_size: int | None = None
    peeked: Sequence[Peeked] = ()

    def __call__(self, loader: object) -> object:
        """The loader to train on."""
        if self.batch_size is not None and loader_size(loader) != self.batch_size:
            loader = with_batch_size(loader, self.batch_size)
        for peeked in self.peeked:
            if peeked.source is loader or peeked.source is getattr(loader, "dataset", None):
                return reading(loader, peeked)
        return loader


def training_loaders(trainer: pl.Trainer) -> CombinedLoader:
    """The loaders that this fit will train on, with Lightning's samplers, made anew: Lightning's own are untouched.

    Raises:
        ProfileError: there is none, or one is something else.
    """
    source = trainer.fit_loop._data_source
    if not source.is_defined():
        raise ProfileError(
            "Expected a training dataloader to profile the model on, got none. Pass train_dataloaders= or datamodule="
            " to Trainer.fit, or define train_dataloader in the LightningModule."
        )
    requested = _request_dataloader(source)
    if isinstance(requested, CombinedLoader):
        combined = copy.copy(requested)
        if requested is source.instance:
            # Lightning writes the loaders that it trains on into what it is given, which may be used again.
            source.instance = copy.copy(requested)
    else:
        combined = CombinedLoader(requested, "max_size_cycle")
    for loader in combined.flattened:
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise ProfileError(
                f"Expected training dataloaders that can be iterated over, got {loader!r}. Pass DataLoaders to"
                " Trainer.fit, or return them from train_dataloader."
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns when it makes its own
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]  # set by a connector
            _resolve_overfit_batches(combined, mode=RunningStage.TRAINING)
        combined.flattened = [
            _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, loader)
            for loader in combined.flattened
        ]
    return combined


def _first(batches: Iterator[Any]) -> Any:
    return next(batches, None)


def first_batch(loaders: CombinedLoader, choose: Callable[[Iterator[Any]], Any] = _first) -> tuple[Any, list[Peeked]]:
    """A batch of the combined loader as training would see it, and the sources that can only be read once.

    Neither the loaders nor any random numbers are different afterwards.

    Args:
        loaders: for training.
        choose: takes their batches and returns one; None: the first.

    Raises:
        ProfileError: there is none.
    """
    peeked: dict[int, Peeked] = {}
    copies = []
    for loader in loaders.flattened:
        source = read_once_source(loader)
        if source is not None:
            copies.append(reading(loader, peeked.setdefault(id(source), Peeked(source))))
        else:
            copies.append(copy_of(loader) if isinstance(loader, DataLoader) else loader)
    combined = copy.copy(loaders)
    combined.flattened = copies
    with isolate_rng(include_cuda=False), _unchanged_generators(loaders.flattened):
        found = choose(batch for batch, _, _ in combined)
        combined.reset()
    for source in peeked.values():
        source.stop_looking()
    if found is None:
        raise ProfileError("Expected at least one training batch to profile the model on, but the dataloader is empty.")
    return found, list(peeked.values())


@contextmanager
def _unchanged_generators(loaders: Sequence[object]) -> Iterator[None]:
    """Random number generators that loaders and samplers were given are as before in the end."""
    generators = []
    for loader in loaders:
        sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
        holders = (loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
        generators += [holder.generator for holder in holders if hasattr(holder, "generator")]
    states = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def samples_in(batch: Any) -> int:
    """Number of samples that Lightning sees in a batch."""
    with warnings.catch_warnings():
        # Ambiguous batches: Lightning's guess is what its own logging uses.
        warnings.filterwarnings("ignore", "Trying to infer the `batch_size`")
        return extract_batch_size(batch)


def common_size(loaders: CombinedLoader) -> int | None:
    """The batch size that all loaders have; None where they differ or one does not say."""
    sizes = {loader_size(loader) for loader in loaders.flattened}
    return sizes.pop() if len(sizes) == 1 else None


def why_kept(loaders: CombinedLoader) -> str | None:
    """Why these loaders cannot be given one new batch size; None if they can."""
    for loader in loaders.flattened:
        reason = why_fixed(loader)
        if reason is not None:
            return reason
    sizes = [loader_size(loader) for loader in loaders.flattened]
    if len(set(sizes)) > 1:
        return f"there are {len(sizes)} with different batch sizes, {', '.join(map(str, sizes))}"
    return None


def samples_per_rank(loaders: CombinedLoader, *, world_size: int) -> int | None:
    """Samples that a rank's sampler gives in an epoch, of the smallest dataset; None where one has no length."""
    lengths = []
    for loader in loaders.flattened:
        length = sized_len(getattr(loader, "dataset", None))
        if length is None:
            return None
        share = max(1, length // world_size)
        drawn = sized_len(getattr(loader, "sampler", None))
        lengths.append(share if drawn is None else max(1, min(share, drawn)))
    return min(lengths, default=None)
