"""Gathers, frees and reductions of FSDP1 where blocks recompute, in order, against the predicted ones."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils
from torch.distributed.fsdp._flat_param import FlatParamHandle

from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.plans import plan_of
from lightning_osdp import profile_model
from lightning_osdp.apply import apply_plan, units_reduced_last, without_reducing
from lightning_osdp.core.plan import Block
from lightning_osdp.engine import engine_of
from lightning_osdp.simulation import planned_units

WIDTH, NUM_BLOCKS = 8, 3
BLOCKS = [f"blocks.{index}" for index in range(NUM_BLOCKS)]


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout)


class Model(nn.Module):
    """Blocks of which a dropout, if any, saves its mask after the last operator."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Layer(dropout) for _ in range(NUM_BLOCKS))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.last(x) * self.scale).square().mean()

    def training_step(self, batch, batch_idx):
        return self(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


UNITS = {
    "a unit for each block": BLOCKS,
    "a unit for each operator": [f"{block}.{name}" for block in BLOCKS for name in ("norm", "up", "down")],
    "a unit inside of each block's": [name for block in BLOCKS for name in (block, f"{block}.up")],
}


@pytest.fixture(scope="module")
def profiles():
    return {dropout: profile_model(Model(dropout), torch.randn(4, WIDTH)) for dropout in (0.0, 0.1)}


@contextlib.contextmanager
def recorded(monkeypatch):
    """What happens to gathered units, in order: (kind, handle)."""
    seen = []

    def noting(kind, original, which):
        def noted(*args):
            seen.append((kind, args[which]))
            return original(*args)

        return noted

    with monkeypatch.context() as patched:
        for owner, name, kind, which in (
            (FlatParamHandle, "_all_gather_flat_param", "gather", 0),
            (FlatParamHandle, "_free_unsharded_flat_param", "free", 0),
            (_runtime_utils, "_reduce_grad", "reduce", 1),
        ):
            patched.setattr(owner, name, noting(kind, getattr(owner, name), which))
        yield seen


def done(model, plan, monkeypatch):
    """By micro-batch of the second step: what FSDP1 does."""
    root = apply_plan(model, plan, device=torch.device("cpu"))
    last = units_reduced_last(root, plan)
    names = {
        unit._handle: name.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".")
        for name, unit in root.named_modules()
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None
    }
    optimizer = torch.optim.SGD(root.parameters(), lr=0.0)
    for _ in range(2):
        found = []
        for index in range(plan.num_micro_batches):
            is_last = index == plan.num_micro_batches - 1
            with recorded(monkeypatch) as seen, contextlib.nullcontext() if is_last else without_reducing(last):
                loss = root(torch.randn(4, WIDTH))
                if index == 0:
                    optimizer.zero_grad()
                loss.backward()
            found.append([(kind, names[handle]) for kind, handle in seen])
        optimizer.step()
    return found


def predicted(profile, plan):
    """The same, predicted."""
    profile, units, modes = planned_units(plan, profile)
    simulated = engine_of(plan).events_of(profile, units, modes, 2, num_micro_batches=plan.num_micro_batches)
    return [
        [(kind, units[of].name) for kind, of in events if kind in {"gather", "free", "reduce"}] for events in simulated
    ]


def effective(events, gathered):
    """Without frees of what is not gathered, and of the root, which FSDP1 tells of and which free nothing."""
    found = []
    for kind, name in events:
        if kind == "gather":
            gathered.add(name)
        elif kind == "free":
            if name not in gathered or not name:
                continue
            gathered.discard(name)
        found.append((kind, name))
    return found


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fsdp_does_in_this_order_what_is_predicted(units, dropout, profiles, monkeypatch):
    workloads = [("every", 1, BLOCKS), ("every", 2, BLOCKS), ("last", 2, BLOCKS), ("every", 1, BLOCKS[1:2])]
    ways = [("ZDP", "pre"), ("ZDP", "post"), ("ZDP", "none"), ("DP", "pre")]
    for (mode, prefetch), (sync, number, blocks) in itertools.product(ways, workloads):
        model = Model(dropout)
        plan = plan_of(
            model,
            dict.fromkeys(["first", *UNITS[units], "last"], mode),
            world_size=2,
            micro_batch_size=4,
            num_micro_batches=number,
            backward_prefetch=prefetch,
        )
        plan = dataclasses.replace(
            plan,
            units=tuple(dataclasses.replace(unit, sync=sync if unit.name else "every") for unit in plan.units),
            blocks=tuple(Block(name=name, activations="recompute") for name in blocks),
        )
        with fake_group(2):
            found = done(model, plan, monkeypatch)
        ours, theirs = set(), set()
        for expected, seen in zip(predicted(profiles[dropout], plan), found, strict=True):
            assert effective(seen, theirs) == effective(expected, ours), (mode, prefetch, sync, number, blocks)
