"""Fits on loaders of every kind that users have, under the strategy and under DDP, as the ranks run them."""

import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader

sys.path.insert(0, str(Path(__file__).parent))

from cases import largest_difference, trainer, without_measuring
from models import OddMLP
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset

from lightning_osdp import OSDPStrategy, SearchSpace

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
    """Every rank's own share of a dataset, one by one."""

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
    """Its constructor's argument is no attribute."""

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
"""Lightning itself cannot give these its distributed sampler."""


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
    """What training under the strategy with a batch size of its own was, beside DDP on loaders of that size."""
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
