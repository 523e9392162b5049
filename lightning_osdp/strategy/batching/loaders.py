"""Training loaders as this fit will have them, their sizes, and copies with another batch size."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls, sized_len
from lightning.pytorch.trainer.connectors.data_connector import (
    _parse_num_batches,
    _process_dataloader,
    _request_dataloader,
    _resolve_overfit_batches,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import Self, override

from lightning_osdp.errors import ProfileError

_LOADING = ("__iter__", "__len__", "_get_iterator", "_index_sampler", "_auto_collation")
_BATCHING = ("__iter__", "__len__")


class FixedLoaderError(Exception):
    """A loader cannot be copied with another batch size; the text says why."""


def training_loaders(trainer: pl.Trainer) -> CombinedLoader:
    """Builds the loaders that this fit will train on, with Lightning's samplers.

    Raises:
        ProfileError: there is no training loader, or one that cannot be iterated over.
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
            # Lightning writes its own loaders into this object, which the user may use again.
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
        warnings.simplefilter("ignore")  # Lightning will warn again when it builds its own loaders
        if trainer.overfit_batches > 0:  # type: ignore[attr-defined]  # set by a connector
            _resolve_overfit_batches(combined, mode=RunningStage.TRAINING)
        combined.flattened = [
            _process_dataloader(trainer, TrainerFn.FITTING, RunningStage.TRAINING, loader)
            for loader in combined.flattened
        ]
    return combined


def forget_loaders(trainer: pl.Trainer) -> None:
    """Drops training loaders that were built before the batch size was chosen, by ``estimated_stepping_batches``."""
    loop = trainer.fit_loop
    if loop._combined_loader is None:
        return
    loop._combined_loader.reset()
    loop._combined_loader = loop._data_fetcher = None
    loop.max_batches = float("inf")
    loop._last_train_dl_reload_epoch = float("-inf")


class _Unread(CombinedLoader):
    """Combined loader that has a length and gives no batch."""

    @override
    def __iter__(self) -> Self:
        self._iterator = _SUPPORTED_MODES[self._mode]["iterator"](self.flattened, self._limits)
        return self

    @override
    def __next__(self) -> Any:
        raise StopIteration


@contextmanager
def unread_loaders(trainer: pl.Trainer, loaders: CombinedLoader) -> Iterator[None]:
    """Has the Trainer show these loaders and their lengths to user code that asks, as in training; none is read.

    Attributes of the Trainer that are set inside are restored at the end.
    """
    loop = trainer.fit_loop
    before = [(holder, dict(vars(holder))) for holder in (trainer, loop)]
    lengths = [sized_len(loader) for loader in loaders.flattened]
    unread = _Unread(loaders.iterables, loaders._mode)
    unread.limits = [
        _parse_num_batches(RunningStage.TRAINING, math.inf if length is None else length, trainer.limit_train_batches)
        for length in lengths
    ]
    number = sized_len(iter(unread))
    loop._combined_loader, loop.max_batches = unread, math.inf if number is None else number
    interval = trainer.val_check_interval
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        trainer.val_check_batch = None
    elif isinstance(interval, int):
        trainer.val_check_batch = interval
    else:
        trainer.val_check_batch = loop.max_batches if number is None else max(1, int(number * interval))
    try:
        yield
    finally:
        for holder, attributes in before:
            vars(holder).clear()
            vars(holder).update(attributes)


def common_size(loaders: CombinedLoader) -> int | None:
    """Batch size of all loaders; None where sizes differ or a loader has no ``batch_size``."""
    sizes = {loader_size(loader) for loader in loaders.flattened}
    return sizes.pop() if len(sizes) == 1 else None


def why_not_resizable(loaders: CombinedLoader) -> str | None:
    """Says why these loaders cannot have one new batch size; None if they can."""
    try:
        for loader in loaders.flattened:
            with_batch_size(loader, loader_size(loader) or 1)
    except FixedLoaderError as error:
        return str(error)
    sizes = [loader_size(loader) for loader in loaders.flattened]
    if len(set(sizes)) > 1:
        return f"there are {len(sizes)} with different batch sizes, {', '.join(map(str, sizes))}"
    return None


def samples_per_rank(loaders: CombinedLoader, *, world_size: int) -> int | None:
    """Samples that a rank's sampler gives in an epoch, of the smallest dataset; None where a dataset has no length."""
    lengths = []
    for loader in loaders.flattened:
        length = sized_len(getattr(loader, "dataset", None))
        if length is None:
            return None
        share, sampler_length = length // world_size, sized_len(getattr(loader, "sampler", None))
        lengths.append(max(1, share if sampler_length is None else min(share, sampler_length)))
    return min(lengths, default=None)


def loader_size(loader: object) -> int | None:
    """Batch size of a loader; None where neither the loader nor its batch sampler has a ``batch_size``."""
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def with_batch_size(loader: object, batch_size: int) -> DataLoader[Any]:
    """Copies a loader, with its sampler, workers and other options, and gives the copy another batch size.

    A loader that iterates as torch's DataLoader does is copied with all attributes. A loader with its own iteration is
    constructed again, as Lightning does to inject samplers.

    Raises:
        FixedLoaderError: the loader is no DataLoader, batches in its own way, or cannot be constructed again.
    """
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise FixedLoaderError(f"{name} is not a torch DataLoader")
    if loader.batch_sampler is None:
        raise FixedLoaderError(f"{name} has batch_size=None, so its dataset makes the batches")
    batch_sampler = _resize_sampler(loader.batch_sampler, batch_size)
    if _inherits(type(loader), DataLoader, _LOADING):
        sizes: dict[str, Any] = {"batch_sampler": batch_sampler}
        if loader.batch_size is not None:  # None where the user gave the batch sampler
            sizes["batch_size"] = batch_size
        return copy_loader(loader, **sizes)
    try:
        rebuilt = _reconstruct(loader, batch_sampler, batch_size)
    except Exception as error:
        raise FixedLoaderError(f"{name} has its own iteration and cannot be constructed again: {error}") from error
    if loader_size(rebuilt) != batch_size:
        raise FixedLoaderError(f"{name} keeps a batch size of its own, {loader_size(rebuilt)}")
    return rebuilt


def batches_in_order(loader: DataLoader[Any]) -> bool:
    """Tells whether batches of any size are consecutive samples of the loader's sampler."""
    return _inherits(type(loader), DataLoader, _LOADING) and _inherits(
        type(loader.batch_sampler), BatchSampler, _BATCHING
    )


def copy_loader(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Makes a shallow copy without workers, with attributes that DataLoader refuses to have set."""
    copied = copy.copy(loader)
    vars(copied).update(attributes, _iterator=None, _IterableDataset_len_called=None)
    return copied


def _resize_sampler(batch_sampler: Any, batch_size: int) -> Any:
    """Copies a batch sampler with another size; one that batches in its own way is constructed again."""
    kind, name = type(batch_sampler), type(batch_sampler).__name__
    if not isinstance(getattr(batch_sampler, "batch_size", None), int):
        raise FixedLoaderError(f"its batch sampler, a {name}, has no batch_size")
    if isinstance(batch_sampler, BatchSampler) and _inherits(kind, BatchSampler, _BATCHING):
        resized = copy.copy(batch_sampler)
        resized.batch_size = batch_size
        return resized
    try:
        resized = kind(**_arguments(batch_sampler, batch_size))
    except Exception as error:
        raise FixedLoaderError(f"its batch sampler, a {name}, cannot be constructed again: {error}") from error
    if resized.batch_size != batch_size:
        raise FixedLoaderError(f"its batch sampler, a {name}, keeps a batch_size of its own, {resized.batch_size}")
    return resized


def _arguments(batch_sampler: Any, batch_size: int) -> dict[str, Any]:
    """Arguments to construct a batch sampler with, from Lightning's record of its constructor or its attributes."""
    parameters = inspect.signature(type(batch_sampler)).parameters
    if "batch_size" not in parameters:
        raise TypeError("its constructor has no argument 'batch_size'")
    attributes = vars(batch_sampler)
    if "__pl_saved_args" in attributes:
        given = dict(zip(attributes["__pl_saved_arg_names"], attributes["__pl_saved_args"], strict=True))
        return {**given, **attributes["__pl_saved_kwargs"], "batch_size": batch_size}
    arguments = {}
    for parameter in parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        names = [name for name in (parameter.name, f"_{parameter.name}") if hasattr(batch_sampler, name)]
        if not names:
            raise TypeError(f"its argument {parameter.name!r} is no attribute")
        arguments[parameter.name] = getattr(batch_sampler, names[0])
    return {**arguments, "batch_size": batch_size}


def _reconstruct(loader: DataLoader[Any], batch_sampler: Any, batch_size: int) -> DataLoader[Any]:
    positional, given = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
    names = getattr(loader, "__pl_saved_arg_names", ())
    arguments = {**dict(zip(names, positional, strict=True)), **given}
    if arguments.get("batch_sampler") is not None:
        arguments["batch_sampler"] = batch_sampler
    else:
        arguments["batch_size"] = batch_size
    rebuilt: DataLoader[Any] = _reinstantiate_wrapped_cls(loader, **arguments)
    return rebuilt


def _inherits(kind: type, base: type, names: tuple[str, ...]) -> bool:
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in names)
