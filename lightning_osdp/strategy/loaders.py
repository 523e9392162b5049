"""The training loader: one batch of it to profile on, and the same loader with another batch size."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
from lightning.pytorch.trainer.connectors.data_connector import _process_dataloader, _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs, extract_batch_size
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_osdp.errors import ProfileError


def training_loaders(trainer: pl.Trainer) -> CombinedLoader:
    """The loaders that this fit will train on, with Lightning's samplers, made anew: Lightning's own are untouched.

    Raises:
        ProfileError: there is none.
    """
    source = trainer.fit_loop._data_source
    if not source.is_defined():
        raise ProfileError(
            "Expected a training dataloader to profile the model on, got none. Pass train_dataloaders= or datamodule="
            " to Trainer.fit, or define train_dataloader in the LightningModule."
        )
    requested = _request_dataloader(source)
    combined = requested if isinstance(requested, CombinedLoader) else CombinedLoader(requested, "max_size_cycle")
    combined.flattened = [
        _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, loader) for loader in combined.flattened
    ]
    return combined


def first_batch(loaders: CombinedLoader) -> Any:
    """The first batch of the combined loader, as training would see it.

    Raises:
        ProfileError: the loader is empty.
    """
    with torch.random.fork_rng(devices=[]):
        iterator = iter(loaders)
        first = next(iterator, None)
        loaders.reset()
    if first is None:
        raise ProfileError("Expected at least one training batch to profile the model on, but the dataloader is empty.")
    return first[0]


def samples_in(batch: Any) -> int:
    """Number of samples that Lightning sees in a batch."""
    with warnings.catch_warnings():
        # Ambiguous batches: Lightning's guess is what its own logging uses.
        warnings.filterwarnings("ignore", "Trying to infer the `batch_size`")
        return extract_batch_size(batch)


def loader_size(loader: object) -> int | None:
    """Micro-batch size of a loader, None where it does not say."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def dataset_length(loaders: CombinedLoader) -> int | None:
    """Samples in the smallest dataset; None where one has no length."""
    lengths = []
    for loader in loaders.flattened:
        dataset = getattr(loader, "dataset", None)
        if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return None
        lengths.append(len(dataset))
    return min(lengths, default=None)


def why_fixed(loader: object) -> str | None:
    """Why this loader cannot be rebuilt with another batch size; None if it can."""
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"{name} is not a torch DataLoader"
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return f"{name} batches by a sampler of its own"
    try:
        with_batch_size(loader, loader.batch_size)
    except Exception as error:
        return f"{name} cannot be constructed again: {error}"
    return None


def with_batch_size(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """The same loader, sampler and all, with another batch size."""
    args, kwargs = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    rebuilt: DataLoader[Any] = _reinstantiate_wrapped_cls(loader, *args, **{**kwargs, "batch_size": batch_size})
    return rebuilt
