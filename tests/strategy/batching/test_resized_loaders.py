"""Loaders with another batch size: what stays as it was, and why some are kept."""

from functools import partial
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from lightning_osdp.strategy.batching.loaders import loader_size, why_not_resizable, with_batch_size

DATA = TensorDataset(torch.arange(10.0))


class Countless(IterableDataset):
    def __iter__(self):
        yield from torch.arange(3.0)


class Stubborn(DataLoader):
    """Loader whose constructor's argument is no attribute, so nobody can call the constructor again."""

    def __init__(self, source):
        super().__init__(source, batch_size=2)
        self.note = "kept"


class Echoing(DataLoader):
    """Iterates in a way of its own, so that only its constructor knows how."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


class StubbornEcho(Echoing):
    def __init__(self, source):
        super().__init__(source, batch_size=2)


class Reversed(BatchSampler):
    """A subclass with iteration and argument of its own."""

    def __init__(self, sampler, batch_size, drop_last, shift=0):
        super().__init__(sampler, batch_size, drop_last)
        self._shift = shift

    def __iter__(self):
        for batch in super().__iter__():
            yield [(index + self._shift) % 10 for index in reversed(batch)]


class Named(BatchSampler):
    """A subclass that batches as PyTorch does, and whose argument is no attribute."""

    def __init__(self, source, name):
        super().__init__(torch.utils.data.SequentialSampler(source), 2, drop_last=True)


class Secretive(Reversed):
    def __init__(self, sampler, batch_size, drop_last, secret=3):
        super().__init__(sampler, batch_size, drop_last, shift=secret)


class Sizeless(BatchSampler):
    def __init__(self, sampler):
        super().__init__(sampler, 2, drop_last=False)

    def __iter__(self):
        yield [0, 1]


def batches(loader):
    return [batch[0].tolist() for batch in loader]


def test_everything_but_the_size_stays():
    sampler = DistributedSampler(DATA, 2, 1, shuffle=True, seed=5)
    init, collate, generator = partial(print), partial(default_collate), torch.Generator()
    loader = DataLoader(
        DATA,
        batch_size=2,
        sampler=sampler,
        drop_last=True,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=3,
        pin_memory=False,
        timeout=7,
        worker_init_fn=init,
        collate_fn=collate,
        generator=generator,
        multiprocessing_context="fork",
    )
    rebuilt = with_batch_size(loader, 3)
    assert loader_size(rebuilt) == rebuilt.batch_sampler.batch_size == 3
    assert rebuilt.batch_sampler.sampler is rebuilt.sampler is sampler
    assert rebuilt.drop_last
    assert rebuilt.batch_sampler.drop_last
    names = "num_workers persistent_workers prefetch_factor pin_memory timeout worker_init_fn collate_fn generator"
    for name in [*names.split(), "multiprocessing_context", "dataset"]:
        assert getattr(rebuilt, name) is getattr(loader, name), name
    assert loader_size(loader) == loader.batch_sampler.batch_size == 2
    assert type(rebuilt) is DataLoader


def test_persistent_workers_are_not_shared():
    loader = DataLoader(DATA, batch_size=2, num_workers=1, persistent_workers=True)
    assert len(batches(loader)) == 5
    rebuilt = with_batch_size(loader, 5)
    assert len(batches(rebuilt)) == 2
    assert rebuilt._iterator is not loader._iterator
    assert len(batches(loader)) == 5


@pytest.mark.parametrize("is_hook", [False, True])
def test_positional_arguments_and_arguments_that_are_no_attributes(is_hook):
    def make():
        return DataLoader(DATA, 2, True), Stubborn(DATA)

    if is_hook:  # Lightning records what constructors are given in *_dataloader hooks
        with _replace_dunder_methods(DataLoader, "dataset"), _replace_dunder_methods(BatchSampler):
            loaders = make()
    else:
        loaders = make()
    for loader in loaders:
        rebuilt = with_batch_size(loader, 5)
        found = batches(rebuilt)
        assert [len(batch) for batch in found] == [5, 5]
        assert sorted(chain(*found)) == list(range(10))
        assert type(rebuilt) is type(loader)
    assert rebuilt.note == "kept"
    assert type(with_batch_size(loaders[0], 5).sampler).__name__ == "RandomSampler"


def test_a_loader_with_its_own_iteration_is_constructed_again():
    assert [len(batch) for batch in batches(with_batch_size(Echoing(DATA, batch_size=2), 5))] == [5, 5, 5, 5]


def test_an_iterable_dataset_can_be_rebuilt():
    assert [len(batch) for batch in with_batch_size(DataLoader(Countless(), batch_size=2), 3)] == [3]
    assert list(with_batch_size(DataLoader(Countless(), batch_size=2, drop_last=True), 4)) == []


@pytest.mark.parametrize("is_hook", [False, True])
@pytest.mark.parametrize("kind", [Reversed, partial(Secretive, secret=4), Named])
def test_batch_samplers(kind, is_hook):
    def make():
        if kind is Named:
            return DataLoader(DATA, batch_sampler=Named(DATA, "it"))
        options = {"shift": 4} if kind is Reversed else {}
        return DataLoader(DATA, batch_sampler=kind(range(10), 2, False, **options))

    if not is_hook:
        loader = make()
    else:
        with _replace_dunder_methods(DataLoader, "dataset"), _replace_dunder_methods(BatchSampler):
            loader = make()
    if isinstance(kind, partial) and not is_hook:
        assert why_not_resizable(SimpleNamespace(flattened=[loader])).endswith(
            "cannot be constructed again: its argument 'secret' is no attribute"
        )
        return
    assert loader_size(loader) == 2
    rebuilt = with_batch_size(loader, 4)
    assert loader_size(rebuilt) == 4
    assert loader_size(loader) == 2
    plain = kind is Named
    expected = [[0, 1, 2, 3], [4, 5, 6, 7]] if plain else [[7, 6, 5, 4], [1, 0, 9, 8], [3, 2]]
    assert batches(rebuilt) == expected
    assert len(rebuilt) == len(expected)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2, 3], "list is not a torch DataLoader"),
        (DataLoader(DATA, batch_size=None), "DataLoader has batch_size=None, so its dataset makes the batches"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "its batch sampler, a list, has no batch_size"),
        (
            DataLoader(DATA, batch_sampler=Sizeless(range(10))),
            "its batch sampler, a Sizeless, cannot be constructed again: its constructor has no argument 'batch_size'",
        ),
        (StubbornEcho(DATA), "StubbornEcho has its own iteration and cannot be constructed again: "),
    ],
)
def test_a_loader_that_cannot_be_rebuilt_says_why(loader, reason):
    assert why_not_resizable(SimpleNamespace(flattened=[loader])).startswith(reason)


def test_sizes():
    assert loader_size([1]) is None
    assert loader_size(DataLoader(DATA, batch_size=4)) == 4
    assert loader_size(DataLoader(DATA, batch_size=None)) is None
