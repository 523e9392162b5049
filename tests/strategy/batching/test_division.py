"""Divisions that give the same optimizer steps: against windows written out sample by sample."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from lightning_osdp.core.step import Workload
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.batching.division import Division, Windows, possible_sizes, why_not_divided


def trainer(**given):
    defaults = {"limit_train_batches": 1.0, "overfit_batches": 0.0, "val_check_interval": 1.0, "callbacks": []}
    defaults |= {"fast_dev_run": False, "reload_dataloaders_every_n_epochs": 0, "accumulate_grad_batches": 1}
    return SimpleNamespace(**{**defaults, **given})


def loaders(num_samples, batch_size, **given):
    data = TensorDataset(torch.arange(num_samples))
    return CombinedLoader([DataLoader(data, batch_size=batch_size, **given)])


def windows_of(fit, batch_size):
    number = fit.accumulate_grad_batches
    return Windows.of(fit, micro_batch_size=batch_size, num_samples=batch_size * number)


def written_out(num_samples, size, number, limit, *, drop_last):
    """Windows of an epoch as Lightning makes them: in each, the weight of every sample."""
    ends = range(size, num_samples + 1, size) if drop_last else range(size, num_samples + size, size)
    most = int(limit * len(ends)) if isinstance(limit, float) else limit
    batches = [range(end - size, min(end, num_samples)) for end in ends][:most]
    groups = [batches[first : first + number] for first in range(0, len(batches), number)]
    return [{sample: number * len(batch) for batch in group for sample in batch} for group in groups]


@given(
    num_samples=st.integers(1, 60),
    size=st.integers(1, 6),
    number=st.integers(1, 6),
    drop_last=st.booleans(),
    limit=st.sampled_from([1.0, 0.5, 2, 3, 7]),
)
def test_sizes_are_possible_where_every_window_has_the_same_samples_with_the_same_weights(
    num_samples, size, number, drop_last, limit
):
    fit = trainer(accumulate_grad_batches=number, limit_train_batches=limit)
    given, windows = loaders(num_samples, size, drop_last=drop_last), windows_of(fit, size)
    expected = written_out(num_samples, size, number, limit, drop_last=drop_last)
    if not expected:
        return
    why = why_not_divided(fit, given, windows)
    sizes = (size,) if why else possible_sizes(given, windows)
    for other in (each for each in range(1, size * number + 1) if size * number % each == 0):
        counted = windows.counts_for(other)["limit_train_batches"]
        found = written_out(num_samples, other, size * number // other, counted, drop_last=drop_last)
        if other in sizes:
            assert found == expected
        elif not why:
            assert found != expected


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (1, 2, 4, 8)),
        ({"limit_train_batches": 3}, (1, 2, 4)),
        ({"val_check_interval": 3}, (1, 2, 4)),
        ({"val_check_interval": 0.25}, (1, 2, 4)),
        ({"val_check_interval": 0.5}, (1, 2, 4, 8)),
        ({"limit_train_batches": 2, "overfit_batches": 2}, (1, 2, 4, 8)),
    ],
)
def test_what_counts_micro_batches_must_come_out_even(given, sizes):
    fit = trainer(accumulate_grad_batches=2, **given)
    windows = windows_of(fit, 4)
    assert possible_sizes(loaders(16, 4), windows) == sizes


def test_steps_of_more_samples_than_anybody_has_do_not_take_forever():
    windows = Windows.of(trainer(accumulate_grad_batches=2), micro_batch_size=4, num_samples=10**30)
    assert possible_sizes(loaders(16, 4), windows) == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("name", ["limit_train_batches", "val_check_interval", "overfit_batches"])
def test_one_micro_batch_is_not_all_of_them(name):
    windows = windows_of(trainer(**{name: 1.0}), 4)
    assert windows.matches(trainer(**{name: 1.0}))
    assert not windows.matches(trainer(**{name: 1}))
    assert windows_of(trainer(**{name: 0.0}), 4).matches(trainer(**{name: 0}))


def test_the_trainer_counts_in_the_new_micro_batches():
    fit = trainer(accumulate_grad_batches=8, limit_train_batches=8, val_check_interval=4, overfit_batches=8)
    windows = windows_of(fit, 4)
    windows.divide(fit, work(2, 16))
    assert (fit.accumulate_grad_batches, fit.limit_train_batches, fit.val_check_interval) == (16, 16, 8)
    assert fit.overfit_batches == 16
    assert not windows.matches(fit)
    windows.divide(fit, work(4, 8))
    assert windows.matches(fit)
    fractions = trainer(limit_train_batches=0.5, val_check_interval=0.25)
    windows_of(fractions, 4).divide(fractions, work(2, 2))
    assert (fractions.limit_train_batches, fractions.val_check_interval) == (0.5, 0.25)


def work(size, number):
    return Workload(micro_batch_size=size, num_micro_batches=number)


def test_a_fit_goes_on_in_the_micro_batches_of_its_plan_or_of_its_checkpoint():
    fit = trainer(accumulate_grad_batches=4, limit_train_batches=8, fit_loop=SimpleNamespace(_combined_loader=None))
    given = DataLoader(TensorDataset(torch.arange(32)), batch_size=4)
    division, checkpoint = Division(work(8, 2), windows_of(fit, 4), (4, 2, 8, 16)), {}

    def used():
        return division.loader(given).batch_size, fit.accumulate_grad_batches, fit.limit_train_batches

    division.begin(fit)
    assert used() == (8, 2, 4)
    assert division.smaller == work(4, 4)
    division.save(checkpoint)
    assert checkpoint == {"osdp_division": (8, 2)}
    assert division.resumed(work(2, 8)) == work(2, 8)
    assert division.resumed(work(3, 5)) is None  # not of these steps
    assert division.resumed(None) == work(4, 4)  # a run in the user's own micro-batches
    for saved in (work(8, 2), work(3, 5)):
        division.resume(fit, saved)
    with pytest.raises(ConfigurationError, match=r"^Expected the checkpoint's 2 samples x 8 micro-batches to be plann"):
        division.resume(fit, work(2, 8))
    with division.as_given(fit):
        assert used() == (4, 4, 8)
        assert division.loader(given) is given
    assert used() == (8, 2, 4)
    division.end(fit)
    assert (fit.accumulate_grad_batches, fit.limit_train_batches) == (4, 8)


def test_a_stated_global_batch_is_given_in_as_many_of_the_users_micro_batches():
    fit = trainer(fit_loop=SimpleNamespace(_combined_loader=None))
    division = Division(work(8, 2), Windows(4, 1, 16, {}), (4, 8))
    division.begin(fit)
    with division.as_given(fit):
        assert fit.accumulate_grad_batches == 4
    assert fit.accumulate_grad_batches == 2


def test_another_trainer_that_counts_otherwise_keeps_its_own():
    division = Division(work(8, 2), windows_of(trainer(accumulate_grad_batches=4), 4), (4, 8))
    other = trainer(accumulate_grad_batches=3)
    with pytest.warns(UserWarning, match="this Trainer counts or accumulates micro-batches in another way"):
        division.begin(other)
    assert other.accumulate_grad_batches == 3
    given = DataLoader(TensorDataset(torch.arange(32)), batch_size=4)
    assert division.loader(given) is given
    assert division.smaller is None


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Grouped(BatchSampler):
    def __iter__(self):
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(
    ("fit", "given", "why"),
    [
        ({"callbacks": [GradientAccumulationScheduler({0: 2})]}, {}, "a GradientAccumulationScheduler changes"),
        ({"fast_dev_run": True}, {}, "fast_dev_run counts"),
        ({"reload_dataloaders_every_n_epochs": 1}, {}, "loaders that are reloaded"),
        ({}, {"num_samples": 15}, "the last micro-batch of an epoch has 3 samples, which Lightning weighs like 4"),
        ({"limit_train_batches": 3}, {"num_samples": 15}, None),
        ({}, {"num_samples": 15, "drop_last": True}, None),
    ],
)
def test_what_cannot_be_divided_says_why(fit, given, why):
    given = loaders(**{"num_samples": 16, "batch_size": 4, **given})
    found = why_not_divided(trainer(**fit), given, windows_of(trainer(**fit), 4))
    assert found == why or found.startswith(why)


def test_loaders_without_an_order_of_samples_say_why():
    data = TensorDataset(torch.arange(16))
    cases = {
        "2 loaders are combined micro-batch by micro-batch": [DataLoader(data, batch_size=4)] * 2,
        "DataLoader reads an iterable dataset, whose end nobody knows": [DataLoader(Stream(), batch_size=4)],
        "list_iterator is not a torch DataLoader": [iter([])],
        "DataLoader does not take one sample after the other from a sampler with a length": [
            DataLoader(data, batch_sampler=Grouped(range(16), 4, drop_last=False))
        ],
    }
    found = [why_not_divided(trainer(), CombinedLoader(given), windows_of(trainer(), 4)) for given in cases.values()]
    assert found == list(cases)
