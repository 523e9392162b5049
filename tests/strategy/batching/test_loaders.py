"""The batch that is profiled on: looking at it changes nothing. Loaders that were given: sizes, reasons, copies."""

import random

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lightning_osdp.core.step import Workload
from lightning_osdp.errors import ProfileError
from lightning_osdp.strategy.batching.division import Division
from lightning_osdp.strategy.batching.first_batch import Peeked, first_batch, longest_batch, samples_given
from lightning_osdp.strategy.batching.loaders import common_size, samples_per_rank, why_not_resizable

DATA = TensorDataset(torch.arange(10.0))
FOUR = TensorDataset(torch.arange(4.0))


class Countless(IterableDataset):
    def __iter__(self):
        yield from torch.arange(3.0)


class Counted(Countless):
    def __len__(self):
        return 3


class Spent(IterableDataset):
    """Dataset that always returns the same iterator: what was read of it is gone."""

    def __init__(self):
        self.rest = iter(torch.arange(10.0))

    def __iter__(self):
        return self.rest


class Rewound:
    """An iterator that starts anew when asked for an iterator."""

    def __iter__(self):
        self.next = 0
        return self

    def __next__(self):
        self.next += 1
        if self.next > 3:
            raise StopIteration
        return torch.full((2,), self.next)


def combined(*loaders, mode="max_size_cycle"):
    return CombinedLoader(loaders[0] if len(loaders) == 1 else list(loaders), mode)


def test_sizes_and_lengths():
    two = combined(DataLoader(DATA, batch_size=2), DataLoader(FOUR, batch_size=2))
    assert common_size(two) == 2
    assert samples_per_rank(two, world_size=1) == 4
    assert samples_per_rank(two, world_size=2) == 2
    few = DataLoader(DATA, sampler=SequentialSampler(range(3)))
    assert samples_per_rank(combined(few), world_size=2) == 3
    assert samples_per_rank(combined(DataLoader(Countless())), world_size=1) is None
    assert samples_per_rank(combined(DataLoader(Counted())), world_size=1) == 3
    assert samples_per_rank(combined([[1, 2]]), world_size=1) is None


def test_loaders_of_different_sizes_are_kept():
    two = combined(DataLoader(DATA, batch_size=2), DataLoader(FOUR, batch_size=3))
    assert common_size(two) is None
    assert why_not_resizable(two) == "there are 2 with different batch sizes, 2, 3"
    assert why_not_resizable(combined(DataLoader(DATA), range(3))) == "range is not a torch DataLoader"
    assert why_not_resizable(combined(DataLoader(DATA), DataLoader(FOUR))) is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_looking_leaves_loaders_and_random_numbers_alone(num_workers):
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        DATA,
        batch_size=4,
        shuffle=True,
        generator=generator,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    before = torch.random.get_rng_state(), generator.get_state(), random.getstate()
    batch, peeked = first_batch(combined(loader))
    assert len(batch[0]) == 4
    assert not peeked
    assert loader._iterator is None
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert torch.equal(before[1], generator.get_state())
    assert before[2] == random.getstate()


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_looking_gives_what_training_would_see(mode):
    loaders = {"a": DataLoader(DATA, batch_size=4), "b": DataLoader(FOUR, batch_size=3)}
    batch, peeked = first_batch(CombinedLoader(loaders, mode))
    assert batch["a"][0].tolist() == [0, 1, 2, 3]
    assert batch["b"][0].tolist() == [0, 1, 2]
    assert not peeked


def test_an_iterator_is_handed_on_whole():
    source = (torch.full((2,), number) for number in range(3))
    batch, peeked = first_batch(combined(source))
    assert batch.tolist() == [0, 0]
    handed_on = Division(peeked=peeked).loader(source)
    assert isinstance(handed_on, Peeked)
    assert [batch.tolist() for batch in handed_on] == [[0, 0], [1, 1], [2, 2]]
    assert list(handed_on) == []


def test_an_iterator_that_may_start_anew_is_left_alone_with_a_warning():
    source = Rewound()
    with pytest.warns(UserWarning, match="reads the first batch of Rewound, whose __iter__ gives the same object"):
        _, peeked = first_batch(combined(source))
    assert Division(peeked=peeked).loader(source) is source
    assert [batch.tolist() for batch in source] == [[1, 1], [2, 2], [3, 3]]


def test_a_dataset_that_is_read_once_is_handed_on_whole():
    loader = DataLoader(Spent(), batch_size=4)
    batch, peeked = first_batch(combined(loader))
    assert batch.tolist() == [0, 1, 2, 3]
    for workload, expected in [(None, [4, 4, 2]), (Workload(micro_batch_size=5), [5, 5])]:
        loader = DataLoader(Spent(), batch_size=4)
        _, peeked = first_batch(combined(loader))
        handed_on = Division(workload, peeked=peeked).loader(loader)
        batches = list(handed_on)
        assert torch.cat(batches).tolist() == list(range(10))
        assert [len(batch) for batch in batches] == expected
        assert list(handed_on) == []
        assert isinstance(loader.dataset, Spent)


def test_what_stands_for_a_dataset_answers_for_it():
    peeked = Peeked(Counted())
    assert len(peeked) == 3
    source = Spent()
    assert Peeked(source).rest is source.rest
    with pytest.raises(TypeError, match="has no len"):
        len(Peeked(Countless()))


def test_no_batch_at_all_is_an_error():
    with pytest.raises(ProfileError, match="the dataloader is empty"):
        first_batch(combined(DataLoader(TensorDataset(torch.empty(0)))))


def listed(samples):
    """Sequences of other lengths than their number."""
    return {"ids": [torch.ones(7 + int(each)) for each in samples]}


def joined(samples):
    """Sequences in one row."""
    return torch.cat([torch.ones(7 + int(each)) for each in samples])[None]


def looked_at(loader, **options):
    batch, _ = first_batch(combined(loader), **options)
    return samples_given(combined(loader), batch, "longest" if options else None)


@pytest.mark.parametrize("collate", [listed, joined, None])
def test_samples_of_a_batch_are_as_many_as_its_loader_gives(collate):
    data, few = torch.arange(10.0), torch.arange(3.0)
    assert looked_at(DataLoader(data, batch_size=4, collate_fn=collate)) == 4
    assert looked_at(DataLoader(data, batch_size=4, collate_fn=collate), choose=longest_batch) == 4
    assert looked_at(DataLoader(few, batch_size=4, collate_fn=collate)) == 3
    assert looked_at(DataLoader(Countless(), batch_size=4, collate_fn=collate)) == (1 if collate is joined else 3)


def test_samples_of_a_batch_of_the_users_own_are_what_it_says():
    loader = combined(DataLoader(torch.arange(10.0), batch_size=4))
    assert samples_given(loader, torch.ones(9), torch.ones(9)) == 9
    assert samples_given(loader, listed(range(9)), max) == 9
    assert samples_given(loader, listed(range(4)), max) == 4
    assert samples_given(combined([[1, 2]]), torch.ones(5)) == 5


def test_the_last_batch_may_be_the_longest():
    loader = DataLoader([torch.ones(5), torch.ones(5), torch.ones(50)], batch_size=2, collate_fn=list)
    assert looked_at(loader, choose=longest_batch) == 1
