"""Loaders: rebuilt with another batch size, or kept with a reason."""

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lightning_osdp.errors import ProfileError
from lightning_osdp.strategy.loaders import dataset_length, first_batch, loader_size, why_fixed, with_batch_size

DATA = TensorDataset(torch.arange(10.0))


class Endless(IterableDataset):
    def __iter__(self):
        yield from torch.arange(3.0)


class Stubborn(DataLoader):
    """Its constructor's argument is no attribute, so nobody can call it again."""

    def __init__(self, source):
        super().__init__(source, batch_size=2)


def test_a_rebuilt_loader_differs_in_its_batch_size_only():
    sampler = SequentialSampler(DATA)
    loader = DataLoader(DATA, batch_size=2, sampler=sampler, drop_last=True, pin_memory=False)
    rebuilt = with_batch_size(loader, 3)
    assert loader_size(rebuilt) == 3
    assert rebuilt.sampler is sampler
    assert rebuilt.drop_last
    assert [len(batch) for (batch,) in rebuilt] == [3, 3, 3]
    assert loader_size(loader) == 2


def test_an_iterable_dataset_can_be_rebuilt():
    assert why_fixed(DataLoader(Endless(), batch_size=2)) is None
    assert [len(batch) for batch in with_batch_size(DataLoader(Endless(), batch_size=2), 3)] == [3]


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        ([1, 2, 3], "list is not a torch DataLoader"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "DataLoader batches by a sampler of its own"),
        (DataLoader(DATA, batch_size=None), "DataLoader batches by a sampler of its own"),
        (Stubborn(DATA), "Stubborn cannot be constructed again: "),
    ],
)
def test_a_loader_that_cannot_be_rebuilt_says_why(loader, reason):
    assert reason in why_fixed(loader)


def test_sizes_and_lengths():
    assert loader_size([1]) is None
    assert loader_size(DataLoader(DATA, batch_size=4)) == 4
    two = CombinedLoader([DataLoader(DATA), DataLoader(TensorDataset(torch.arange(4.0)))])
    assert dataset_length(two) == 4
    assert dataset_length(CombinedLoader(DataLoader(Endless()))) is None
    assert dataset_length(CombinedLoader([[1, 2]])) is None


def test_the_first_batch_leaves_the_random_numbers_alone():
    before = torch.random.get_rng_state()
    batch = first_batch(CombinedLoader(DataLoader(DATA, batch_size=4, shuffle=True), "max_size_cycle"))
    assert len(batch[0]) == 4
    assert torch.equal(before, torch.random.get_rng_state())


def test_no_batch_at_all_is_an_error():
    empty = CombinedLoader(DataLoader(TensorDataset(torch.empty(0))), "max_size_cycle")
    with pytest.raises(ProfileError, match="the dataloader is empty"):
        first_batch(empty)
