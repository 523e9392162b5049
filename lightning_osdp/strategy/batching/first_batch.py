"""Search for the batch to profile, which takes no batch from training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from types import FunctionType
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_osdp.callbacks.peak import elements_in
from lightning_osdp.errors import ProfileError
from lightning_osdp.planner.scheduler import Shapes
from lightning_osdp.profiler import samples_in, tensors_in
from lightning_osdp.strategy.batching.loaders import batches_in_order, common_size, copy_loader

NUM_SEARCHED_BATCHES = 100
"""Number of batches of the loader among which the longest is searched."""


class Peeked(IterableDataset[Any]):
    """Source that can be read only once, with the items that profiling has read: training gets these items first.

    The source is an iterator that never starts again, or a dataset that always gives the same iterator.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.is_looking = True
        """True while profiling reads; False once training does."""
        self._read: list[Any] = []
        self._rest: Iterator[Any] | None = None

    @override
    def __iter__(self) -> Iterator[Any]:
        rest = iter(self.source) if self._rest is None else self._rest
        if self.is_looking:
            self._rest = rest
            return self._remembering(rest)
        read, self._read, self._rest = self._read, [], None
        return chain(read, rest)

    def _remembering(self, rest: Iterator[Any]) -> Iterator[Any]:
        for item in rest:
            self._read.append(item)
            yield item

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # copy and pickle ask before there is a source
            raise AttributeError(name)
        return getattr(self.source, name)


def read_once_source(loader: object) -> object | None:
    """Finds the object that would lose items read ahead of training: the loader, its dataset, or None.

    Generators and Python's own iterators never start again. A class whose own ``__iter__`` returns the same object each
    time is assumed to start again, with a warning. A dataset loses nothing to workers, which read copies.
    """
    source = loader
    if isinstance(loader, DataLoader) and loader.num_workers == 0:
        source = loader.dataset
    if not isinstance(source, (Iterator, IterableDataset)):
        return None
    iterator = iter(source)
    if iterator is not iter(source):
        return None
    if isinstance(type(iterator).__iter__, FunctionType):
        rank_zero_warn(
            f"OSDP: profiling reads the first batch of {type(source).__name__}, whose __iter__ gives the same object"
            " each time. If that does not start from the beginning, training starts with the second batch. Have"
            " __iter__ return a new iterator, or pass plan=."
        )
        return None
    return source


def reread_loader(loader: object, peeked: Peeked) -> object:
    """Copies a loader so that it reads from ``peeked`` in place of the source."""
    return copy_loader(loader, dataset=peeked) if isinstance(loader, DataLoader) else peeked


def first_batch(
    loaders: CombinedLoader, choose: Callable[[Iterator[Any]], Any] = lambda batches: next(batches, None)
) -> tuple[Any, list[Peeked]]:
    """Reads a batch of the combined loader as training would see it; also gives the sources that can be read only once.

    Neither the loaders nor any generator is changed. ``choose`` takes an iterator of batches and returns one batch;
    a `ProfileError` is raised if it returns None.
    """
    peeked: dict[int, Peeked] = {}
    copies = []
    for loader in loaders.flattened:
        source = read_once_source(loader)
        if source is not None:
            copies.append(reread_loader(loader, peeked.setdefault(id(source), Peeked(source))))
        else:
            copies.append(copy_loader(loader) if isinstance(loader, DataLoader) else loader)
    combined = copy.copy(loaders)
    combined.flattened = copies
    with isolate_rng(include_cuda=False), _unchanged_generators(loaders.flattened):
        batch = choose(batch for batch, _, _ in combined)
        combined.reset()
    for source in peeked.values():
        source.is_looking = False
    if batch is None:
        raise ProfileError("Expected at least one training batch to profile the model on, but the dataloader is empty.")
    return batch, list(peeked.values())


@contextmanager
def _unchanged_generators(loaders: Sequence[object]) -> Iterator[None]:
    """Restores the states of generators that loaders and samplers were given."""
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


def samples_given(loaders: CombinedLoader, batch: Any, wanted: object = None) -> int:
    """Number of samples in a batch of these loaders, which may have more or fewer rows, as where sequences are packed.

    ``wanted`` is the option ``profile_batch``; by a batch or a function of the user's, the batch itself tells.
    """
    size = common_size(loaders)
    if size is None:
        return samples_in(batch)
    is_theirs = wanted is None or isinstance(wanted, str)
    if not is_theirs or not all(map(batches_in_order, loaders.flattened)):
        return samples_in(batch, (size,))
    lengths = [sized_len(loader.batch_sampler.sampler) for loader in loaders.flattened]
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return min(size, samples_in(batch, (size,)))
    most, last = min(size, *known), known[0] % size
    return last if wanted is not None and samples_in(batch, (most, last)) == last else most


def longest_batch(batches: Iterable[Any]) -> Any:
    """Finds the first batch with most elements among the first `NUM_SEARCHED_BATCHES`; None if there is no batch."""
    return max(islice(batches, NUM_SEARCHED_BATCHES), key=elements_in, default=None)


def shapes_of(batch: Any) -> Shapes:
    """Dtypes and shapes of the tensors of a batch; of those without one shape, the number of elements."""

    def shape_of(tensor: Tensor) -> tuple[int, ...]:
        has_shape = tensor.layout is torch.strided and not tensor.is_nested
        return tuple(tensor.shape) if has_shape else (tensor.numel(),)

    return tuple((str(tensor.dtype), shape_of(tensor)) for tensor in tensors_in(batch))


class BatchWatch:
    """Warning, given once, of a batch that has more elements for each sample than the profiled one."""

    def __init__(self, batch: Any, num_samples: int) -> None:
        self._num_samples, self._most = num_samples, elements_in(batch) / max(1, num_samples)

    def look(self, batch: Any, rank: int) -> None:
        """Warns if this batch of this rank has more elements for each sample; never again afterwards."""
        elements = elements_in(batch) / max(1, samples_in(batch, (self._num_samples,)))
        if self._most and elements > self._most:
            factor, self._most = elements / self._most, float("inf")
            warnings.warn(
                f"OSDP: rank {rank} has a batch with {factor:.3g} times as many elements for a sample as the one that"
                " was profiled: steps with such batches take more memory and time than the plan says. Give it the"
                " largest: OSDPStrategy(profile_batch='longest').",
                stacklevel=2,
            )
