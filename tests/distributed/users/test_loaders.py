"""Loaders of every kind: trained on as DDP would, rebuilt with another size, or kept with the reason."""

import warnings

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset

from lightning_osdp import OSDPStrategy, SearchSpace
from tests.distributed.support.fits import largest_difference, trainer, without_measuring
from tests.distributed.support.models import OddMLP
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


SPACE = SearchSpace(min_unit_bytes=0)


class Fed(OddMLP):
    """Trains on whatever its loaders give, remembers how much that was, and asks for it as users do."""

    def __init__(self, kind, size):
        super().__init__("sgd")
        self.kind, self.size = kind, size
        self.sizes, self.num_requests, self.val_sizes = [], 0, set()

    def training_step(self, batch, batch_idx):
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        if isinstance(parts[0], torch.Tensor):
            parts = [parts]
        parts = [part for part in parts if part is not None]
        self.sizes.append(tuple(len(part[0]) for part in parts))
        return sum(self.loss(part) for part in parts)

    def train_dataloader(self):
        self.num_requests += 1
        return LOADERS[self.kind](self.dataset(), self.size)

    def val_dataloader(self):
        return DataLoader(self.dataset(), batch_size=7)

    def validation_step(self, batch, batch_idx):
        self.val_sizes.add(len(batch[0]))


class Stream(IterableDataset):
    """Dataset that gives every rank its own share, one by one."""

    def __init__(self, data):
        self.data = data

    def share(self):
        return range(dist.get_rank(), len(self.data), dist.get_world_size())

    def __iter__(self):
        return (self.data[index] for index in self.share())


class CountedStream(Stream):
    def __len__(self):
        return len(self.share())


class SpentStream(Stream):
    """Reads from something that is open already, as from a socket."""

    def __init__(self, data):
        super().__init__(data)
        self.open = super().__iter__()

    def __iter__(self):
        return self.open


class Backwards(BatchSampler):
    def __init__(self, sampler, batch_size, drop_last, shift):
        super().__init__(sampler, batch_size, drop_last)
        self.shift = shift

    def __iter__(self):
        for batch in super().__iter__():
            yield [(index + self.shift) % 160 for index in reversed(batch)]


class Own(DataLoader):
    """Loader whose constructor's argument is no attribute."""

    def __init__(self, data_and_size):
        super().__init__(data_and_size[0], batch_size=data_and_size[1])


def pair(data, size):
    return DataLoader(data, batch_size=size), DataLoader(Subset(data, range(60)), batch_size=size)


LOADERS = {
    "plain": lambda data, size: DataLoader(data, batch_size=size),
    "shuffled": lambda data, size: DataLoader(data, batch_size=size, shuffle=True),
    "seeded": lambda data, size: DataLoader(
        data, batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "positional": lambda data, size: DataLoader(data, size, True),
    "own": lambda data, size: Own((data, size)),
    "workers": lambda data, size: DataLoader(
        data, batch_size=size, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    ),
    "dict": lambda data, size: dict(zip("ab", pair(data, size), strict=True)),
    "list": lambda data, size: list(pair(data, size)),
    "min_size": lambda data, size: CombinedLoader(list(pair(data, size)), "min_size"),
    "max_size": lambda data, size: CombinedLoader(list(pair(data, size)), "max_size"),
    "uneven": lambda data, size: [DataLoader(data, batch_size=size), DataLoader(data, batch_size=size + 1)],
    "iterable": lambda data, size: DataLoader(Stream(data), batch_size=size),
    "counted": lambda data, size: DataLoader(CountedStream(data), batch_size=size, drop_last=True),
    "batch_sampler": lambda data, size: DataLoader(
        data, batch_sampler=Backwards(range(len(data)), batch_size=size, drop_last=True, shift=3)
    ),
    "spent": lambda data, size: DataLoader(SpentStream(data), batch_size=size),
    "generator": lambda data, size: iter(list(DataLoader(Stream(data), batch_size=size))),
}
LIGHTNING_CANNOT = {"positional", "own"}
"""Loaders that Lightning itself cannot give its distributed sampler."""


@without_measuring
def fitted(strategy, kind, size, *, by_hand=False, **options):
    """Weights (rank 0), module and warnings after a fit; loaders are given to fit, or asked of the module."""
    L.seed_everything(11, verbose=False)
    module = Fed(kind, size)
    defaults = {"use_distributed_sampler": kind not in LIGHTNING_CANNOT, "max_steps": 6, "limit_val_batches": 2}
    options = {**defaults, **options}
    given = LOADERS[kind](module.dataset(), size) if by_hand else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit = trainer(strategy, **options)
        fit.fit(module, given)
    state = fit.strategy.lightning_module_state_dict()
    state = {key: value.detach().clone() for key, value in state.items()}
    return state, module, [str(w.message) for w in caught if "OSDP" in str(w.message)], fit


def equals_ddp(kind, asked=None, given=4, **options):
    """Compares training under the strategy with a batch size of its own with DDP on loaders of that size."""
    strategy = OSDPStrategy(batch_size=asked or "auto", search_space=SPACE)
    state, module, said, fit = fitted(strategy, kind, given, **options)
    ddp = DDPStrategy(process_group_backend="gloo")
    expected, reference, _, _ = fitted(ddp, kind, asked or given, **options)
    return {
        "difference": largest_difference(state, expected) if dist.get_rank() == 0 else 0.0,
        "planned": fit.strategy.plan.micro_batch_size,
        "sizes": (module.sizes, reference.sizes),
        "requests": (module.num_requests, reference.num_requests),
        "warnings": said,
        "val_sizes": module.val_sizes,
    }


@without_measuring
def attribute_writes():
    """Attributes of the user's own loaders before and after a fit that rebuilds them."""
    module = Fed("dict", 4)
    sampler = torch.utils.data.DistributedSampler(module.dataset(), shuffle=False)
    loader = DataLoader(module.dataset(), batch_size=4, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    combined = CombinedLoader({"a": loader}, "max_size_cycle")
    before = dict(vars(loader)), dict(vars(combined)), dict(vars(loader.batch_sampler))
    fit = trainer(OSDPStrategy(batch_size=10, search_space=SPACE), use_distributed_sampler=True, max_steps=2)
    fit.fit(module, combined)
    after = dict(vars(loader)), dict(vars(combined)), dict(vars(loader.batch_sampler))
    return module.sizes, [b == a for b, a in zip(before, after, strict=True)]


def lightning_refuses(kind):
    """Errors of the strategy and of DDP for loaders that Lightning cannot give its sampler."""

    def text(strategy):
        try:
            fitted(strategy, kind, 4, use_distributed_sampler=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return text(OSDPStrategy(search_space=SPACE)), text(DDPStrategy(process_group_backend="gloo"))


def one_plan_for_different_loaders():
    """A plan that was made on uneven loaders, given to a fit on them, and to one on another size."""
    plan = fitted(OSDPStrategy(search_space=SPACE), "uneven", 4)[3].strategy.plan
    _, uneven, said, _ = fitted(OSDPStrategy(plan=plan), "uneven", 4)
    _, other, _, _ = fitted(OSDPStrategy(plan=plan), "plain", 10)
    _, kept, _, _ = fitted(OSDPStrategy(plan=plan, batch_size="keep"), "plain", 10)
    return plan.micro_batch_size, uneven.sizes[0], said, other.sizes[0], kept.sizes[0]


def check(found, *, planned):
    for one in found:
        assert one["difference"] < 1e-6
        assert one["planned"] == planned
        assert one["sizes"][0] == one["sizes"][1]
        assert one["val_sizes"] == {7}


@pytest.mark.parametrize(
    "kind",
    ["uneven", *(slow(each) for each in ("generator", "seeded", "positional", "list", "spent", "batch_sampler"))],
)
def test_loaders_asked_of_the_module_are_left_as_they_are(ranks, kind):
    found = ranks(2).run(equals_ddp, kind=kind)
    check(found, planned=4)
    assert not found[0]["warnings"]


REBUILT = set(LOADERS) - {"uneven", "generator", "seeded"}
SLOW = REBUILT - {"shuffled", "workers", "batch_sampler"}
ON_FOUR = ["batch_sampler", "counted", "max_size", "shuffled", "workers"]
"""Loaders for each way to divide samples among ranks: Lightning's sampler, alone and inside of others, one's own."""


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [*(slow(2, kind) if kind in SLOW else (2, kind) for kind in sorted(REBUILT)), *(slow(4, kind) for kind in ON_FOUR)],
)
def test_loaders_rebuilt_with_another_size_equal_ddp_at_that_size(ranks, kind, world_size):
    found = ranks(world_size).run(equals_ddp, kind=kind, asked=6)
    check(found, planned=6)
    assert not found[0]["warnings"]


@pytest.mark.parametrize(
    ("world_size", "kind", "asked"),
    [
        slow(2, "seeded", None),
        (2, "seeded", 6),
        (2, "generator", None),
        slow(2, "spent", 6),
        slow(2, "workers", 6),
        slow(4, "seeded", 6),
        slow(4, "generator", None),
    ],
)
def test_loaders_given_to_fit_are_as_profiling_found_them(ranks, kind, asked, world_size):
    found = ranks(world_size).run(equals_ddp, kind=kind, asked=asked, by_hand=True)
    check(found, planned=asked or 4)


@pytest.mark.parametrize(
    ("world_size", "kind", "reason"),
    [
        slow(2, "uneven", "there are 2 with different batch sizes, 4, 5"),
        (2, "generator", "list_iterator is not a torch DataLoader"),
        slow(4, "uneven", "there are 2 with different batch sizes, 4, 5"),
    ],
)
def test_loaders_that_cannot_be_rebuilt_are_kept_with_the_reason(ranks, kind, reason, world_size):
    found = ranks(world_size).run(equals_ddp, kind=kind, asked=6)[0]
    assert found["planned"] == 4
    assert {size[0] for size in found["sizes"][0]} == {4}
    assert found["warnings"] == [f"OSDP: batch_size=6 is ignored, the loader keeps 4: {reason}."]


RELOAD = {"reload_dataloaders_every_n_epochs": 1, "limit_train_batches": 2}


@pytest.mark.parametrize(
    ("world_size", "options", "asked"),
    [
        slow(2, RELOAD, None),
        (2, RELOAD, 6),
        slow(2, {"overfit_batches": 2}, 6),
        slow(2, {"limit_train_batches": 0.2}, 6),
        slow(4, RELOAD, 6),
        slow(4, {"limit_train_batches": 0.2}, 6),  # a share of an epoch that is as long as there are ranks
    ],
    ids=["reload", "reload and rebuild", "overfit", "limit", "reload and rebuild on four", "limit on four"],
)
def test_the_trainers_own_options_hold(ranks, options, asked, world_size):
    found = ranks(world_size).run(equals_ddp, kind="shuffled", asked=asked, **options)
    check(found, planned=asked or 4)
    ours, ddps = found[0]["requests"]
    assert ours == ddps + 1  # for the batch that is profiled


def test_no_attribute_of_the_users_loaders_is_written(ranks):
    sizes, unchanged = ranks(2).run(attribute_writes)[0]
    assert set(sizes) == {(10,)}
    assert unchanged == [True, True, True]


@pytest.mark.parametrize("kind", sorted(LIGHTNING_CANNOT))
def test_what_lightning_cannot_give_its_sampler_fails_as_under_ddp(ranks, kind):
    ours, ddps = ranks(2).run(lightning_refuses, kind=kind)[0]
    assert ours == ddps


@pytest.mark.slow
def test_a_given_plan_sets_the_size_of_one_loader_but_not_of_different_ones(ranks):
    planned, uneven, said, other, kept = ranks(2).run(one_plan_for_different_loaders)[0]
    assert planned == 4
    assert uneven == (4, 5)
    assert said == [
        "OSDP: the plan's micro-batch is 4, but loaders keep theirs: there are 2 with different batch sizes, 4, 5."
    ]
    assert other == (4,)
    assert kept == (10,)
