"""Fits of a model with user code in it: under plans written by hand, under one of the strategy's own, and under DDP."""

import dataclasses

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPPrecision, OSDPStrategy
from lightning_osdp.errors import OSDPError
from lightning_osdp.operations.splitting import JoinedShards
from tests.distributed.support.fits import EVERYTHING, largest_difference, trainer, without_measuring
from tests.distributed.support.models import BATCH_SIZE, Base, OddMLP

WIDTH = 6
KINDS = {
    "zdp": ["ZDP"],
    "dp": ["DP"],
    "mixed": ["ZDP", "DP"],
    "node": ["HSDP", "HDP"],
    "nodes": ["ZDP", "HSDP", "hpZ", "HDP", "DP"],
}
"""Modes of units by kind of plan; the last two kinds have nodes of two ranks, in each of which the root is sharded."""


class Chain(Base):
    """Layers, a norm, and a scalar parameter in the root."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first, self.second, self.third = nn.Linear(7, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def features(self, x):
        return torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        return F.mse_loss(self.last(self.norm(self.features(x))) * self.scale, y)

    def dataset(self):
        return OddMLP().dataset()


def units_of(module):
    """Returns names of modules that are to be units: as the model says, or all that have parameters themselves."""
    named = module.named_modules()
    own = [name for name, child in named if name and next(child.parameters(recurse=False), None) is not None]
    return getattr(module, "units", own)


def plan_with(make, kind, *, sync="every", dtype="float64", **options):
    """A plan for models that this makes, whose units take turns in the modes of a kind; prefetches forward, too."""
    module, modes = in_dtype(make(), dtype), KINDS[kind]
    chosen = {name: modes[index % len(modes)] for index, name in enumerate(units_of(module))}
    given = {"world_size": dist.get_world_size(), "micro_batch_size": BATCH_SIZE, "forward_prefetch": True, **options}
    plan = plan_of(module, chosen, **given)
    units = [unit.treated(sync=sync if unit.name else "every") for unit in plan.units]
    if kind in ("node", "nodes"):
        units = [unit if unit.name else unit.in_modes("HDP") for unit in units]
        plan = dataclasses.replace(plan, node_size=2)
    return dataclasses.replace(plan, units=tuple(units))


def in_dtype(module, dtype):
    """Converts a module, but for complex parameters, or leaves it as it is if there is no dtype."""
    return {None: lambda: module, "float32": module.float, "float64": module.double}[dtype]()


def ddp(**options):
    return DDPStrategy(process_group_backend="gloo", **options)


def fitted(strategy, module, *, dtype="float64", ckpt_path=None, **options):
    """Whole weights (on rank 0, under DDP on all) with the losses under the name "losses", and the trainer."""
    is_ours = isinstance(strategy, OSDPStrategy)
    if dtype == "float64":
        options |= {"plugins": [OSDPPrecision("64-true")]} if is_ours else {"precision": "64-true"}
    module = in_dtype(module, dtype)
    fit = trainer(strategy, **options)
    loader = module.loader(dist.get_rank(), dist.get_world_size())
    fit.fit(module, loader, DataLoader(module.dataset(), batch_size=16), ckpt_path=ckpt_path)
    weights = fit.strategy.lightning_module_state_dict()
    wholes = {
        name: value.full_tensor() if isinstance(value, JoinedShards) else value for name, value in weights.items()
    }
    state = {name: value.detach().clone() for name, value in sorted(wholes.items())}
    return state, module.losses, fit


def differences(make, kinds=("mixed",), *, expected=None, sync="every", plan_options=None, ddp_options=None, **options):
    """Returns distances of weights (on rank 0) and losses from DDP's by kind of plan, and how far weights moved.

    Args:
        make: makes the model, with the same values each time.
        kinds: kinds of plans, from `KINDS`.
        expected: makes the model that DDP trains, where that is another one.
        sync: synchronisation of all units but the root.
        plan_options: options of `plan_of`.
        ddp_options: options of `DDPStrategy`.
        **options: options of the Trainer.
    """
    by_ddp = fitted(ddp(**(ddp_options or {})), (expected or make)(), **options)
    state = by_ddp[0]
    found = {"moved": moved(state, make)}
    for kind in kinds:
        plan = plan_with(make, kind, sync=sync, dtype=options.get("dtype", "float64"), **(plan_options or {}))
        found[kind] = difference(fitted(OSDPStrategy(plan=plan, node_size=plan.node_size), make(), **options), by_ddp)
    return found


def difference(own, expected):
    """Largest difference between two results of `fitted`, in losses and, on rank 0, in weights."""
    (state, losses, _), (expected_state, expected_losses, _) = own, expected
    assert len(losses) == len(expected_losses), (len(losses), len(expected_losses))
    off = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    return max(off, largest_difference(state, expected_state) if dist.get_rank() == 0 else 0.0)


@without_measuring
def compared(make, strategies, **options):
    """Returns differences from one fit under DDP, by name of a strategy, and how far weights moved; see `check`."""
    expected = fitted(ddp(find_unused_parameters=True), make(), **options)
    found = {name: difference(fitted(each, make(), **options), expected) for name, each in strategies.items()}
    return {"moved": moved(expected[0], make), **found}


def refusal(work):
    """The error of this project that this raises; None where it raises none."""
    try:
        work()
    except OSDPError as error:
        return f"{type(error).__name__}: {error}"
    return None


@without_measuring
def planned(make, **options):
    """Difference from DDP, the plan, and the weights that DDP trains."""
    own = fitted(OSDPStrategy(search_space=EVERYTHING), make(), max_steps=4, **options)
    expected = fitted(ddp(find_unused_parameters=True), make(), max_steps=4, **options)
    return difference(own, expected), own[2].strategy.plan, expected[0]


def moved(state, make):
    """Returns how far weights are from where they began."""
    start = dict(sorted(make().state_dict().items()))
    return largest_difference(state, start)


class Adapter(nn.Module):
    """A frozen layer with two small matrices beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


TOLERANCE = 1e-10


def check(found, tolerance=TOLERANCE):
    """Checks that each case equals DDP, and moved weights."""
    assert found
    for name, each in found.items():
        assert each.pop("moved") > 1e-3, name
        assert each, name
        assert max(each.values()) < tolerance, (name, each)
