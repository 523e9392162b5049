"""A model of blocks that drop and sum their parts, and its training under a plan that may change, beside DDP."""

import dataclasses
import itertools
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.testbed.plans import plan_of
from lightning_osdp import change_plan
from lightning_osdp.apply import ShardedModel
from tests.distributed.support.models import Base, OddMLP

CPU = torch.device("cpu")
BLOCKS = ["pair.before", "pair.after", "alone"]
UNITS = {
    "root only": [],
    "two blocks": ["first", "pair", "alone", "last"],
    "block": ["first", *BLOCKS, "last"],
    "both": ["first", *(name for block in BLOCKS for name in (block, f"{block}.up")), "last"],
    "operators": ["first", *(f"{block}.{name}" for block in BLOCKS for name in ("norm", "up", "down")), "last"],
}
"""Modules that are wrapped besides the root."""
MODES = {"ZDP": ["ZDP"], "DP": ["DP"], "mixed": ["DP", "ZDP"]}
"""Modes of units, in turn."""
SLICES = {"up": ("ZDP", "DP", "ZDP"), "down": ("DP", "ZDP")}
"""Modes of slices of operators that are units, under the modes "slices"; other units have mixed ones."""

KEPT = {"selective_1": (0,), "selective_2": (0, 1)}
"""Results that blocks keep at a level."""


class Part(nn.Module):
    """Dropout inside, buffers, a keyword argument and two outputs; nothing is saved after its last operator."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, gate):
        self.calls += 1
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), 0.2)
        return x + self.down(hidden * gate), gate.tanh()


class DroppingPart(Part):
    """Ends with dropout, which saves its mask."""

    def forward(self, x, *, gate):
        x, gate = super().forward(x, gate=gate)
        return F.dropout(x, 0.1), gate


class Pair(nn.Module):
    """Two blocks."""

    def __init__(self, kind, width):
        super().__init__()
        self.before, self.after = kind(width), kind(width)

    def forward(self, x, gate):
        x, gate = self.before(x, gate=gate)
        return self.after(x, gate=gate)


class Parts(Base):
    kind = Part

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 3)
        self.pair, self.alone = Pair(self.kind, 6), self.kind(6)
        self.gate = nn.Parameter(torch.ones(12))

    def loss(self, batch):
        x, y = (tensor.to(self.gate.dtype) for tensor in batch)
        x, gate = self.pair(self.first(x), self.gate)
        x, _ = self.alone(x, gate=gate)
        return F.mse_loss(self.last(x), y)

    def dataset(self):
        return OddMLP().dataset()


class DroppingParts(Parts):
    kind = DroppingPart


def batches_of(module, rank, number):
    loader = iter(module.loader(rank, dist.get_world_size()))
    return [next(loader) for _ in range(number)]


MICRO_BATCHES = 2
STEPS = 7


class Net(DroppingParts):
    """Model of which only `forward` is called, as apply_plan's users call it."""

    def forward(self, batch):
        return self.loss(batch)


def module_of():
    return Net().double()


def base_plan(units, *, slices=False):
    """A plan of `Net` with modes in turn."""
    chosen = dict(zip(UNITS[units], itertools.cycle(MODES["mixed"]), strict=False))
    if slices:
        chosen |= {name: SLICES[kind] for name in chosen if (kind := name.rpartition(".")[2]) in SLICES}
    return plan_of(
        module_of(), chosen, world_size=dist.get_world_size(), micro_batch_size=4, num_micro_batches=MICRO_BATCHES
    )


class Run:
    """A module under a plan, its optimizer, and steps of it."""

    def __init__(self, plan):
        torch.manual_seed(3)
        self.module = module_of()
        self.model = ShardedModel.planned(self.module, plan, device=CPU)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)

    def step(self, batches):
        losses = []
        for index, batch in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else self.model.accumulating():
                loss = self.module(batch) / len(batches)
                self.model.before_backward()
                loss.backward()
            losses.append(loss.detach())
        self.model.before_optimizer_step(self.optimizer)
        self.optimizer.step()
        self.model.reshard()
        self.optimizer.zero_grad()
        return losses

    def names(self):
        """Returns all names by which anyone might know something."""
        optimizer = self.model.optimizer_state(self.optimizer, "sharded")
        return {
            "parameters": [name for name, _ in self.module.named_parameters()],
            "modules": [name for name, _ in self.module.named_modules()],
            "buffers": [name for name, _ in self.module.named_buffers()],
            "state": list(self.model.model_state("sharded")),
            "whole state": list(self.model.whole_state(on_all_ranks=True)),
            "optimizer": sorted(optimizer["state"]) if optimizer["state"] else [],
        }

    def found(self, losses):
        """Returns losses, random numbers and the whole state."""
        state = self.model.whole_state(on_all_ranks=True)
        return {"losses": torch.stack(losses), "random": torch.rand(3), **state}


def batches_by_step():
    batches = batches_of(module_of(), dist.get_rank(), STEPS * MICRO_BATCHES)
    return [batches[i : i + MICRO_BATCHES] for i in range(0, len(batches), MICRO_BATCHES)]


def trained(plan, changes=()):
    """Trains, and returns what it comes to and the names under each plan.

    Args:
        plan: the first plan.
        changes: plans to change to after each step.
    """
    run, losses, names = Run(plan), [], []
    batches = batches_by_step()
    torch.manual_seed(7 + dist.get_rank())
    for step, (given, following) in enumerate(itertools.zip_longest(batches, changes)):
        losses += run.step(given)
        if step:
            with torch.random.fork_rng():
                names.append(run.names())
        if following is not None:
            change_plan(run.module, following)
            assert run.model.plan is following
    return run.found(losses), names


def ddp():
    """Trains under DDP, and returns losses, random numbers and the whole state."""
    torch.manual_seed(3)
    module = DistributedDataParallel(module_of(), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batches, losses = batches_by_step(), []
    torch.manual_seed(7 + dist.get_rank())
    for given in batches:
        for index, batch in enumerate(given):
            with nullcontext() if index == len(given) - 1 else module.no_sync():
                loss = module(batch) / len(given)
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), "random": torch.rand(3), **module.module.state_dict()}


def apart(one, other):
    assert set(one) == set(other), (list(one), list(other))
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# ---- what is refused


def with_sync(plan, sync):
    units = tuple(unit.treated(sync=sync if unit.name else "every") for unit in plan.units)
    return dataclasses.replace(plan, units=units)
