"""Blocks that recompute or offload, as the ranks run them: many plans per launch, against blocks that keep all."""

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from models import Base, OddMLP

from benchmarks.testbed.plans import plan_of
from lightning_osdp.apply import apply_plan, units_reduced_last, without_reducing
from lightning_osdp.apply.activations import block_forwards
from lightning_osdp.core.plan_unit import Block

CPU = torch.device("cpu")
CHOICES = ("recompute", "offload", "recompute_offload")
UNITS = {
    "block": [["", ".norm", ".up", ".down"]],
    "operators": [[".norm"], [".up"], [".down"]],
    "both": [["", ".norm", ".down"], [".up"]],
}
"""Units of a block, by what is wrapped: the unit's module, then what else it holds."""


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


class Parts(Base):
    kind = Part

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 3)
        self.parts = nn.ModuleList(self.kind(6) for _ in range(3))
        self.gate = nn.Parameter(torch.ones(12))

    def loss(self, batch):
        x, y = (tensor.to(self.gate.dtype) for tensor in batch)
        x, gate = self.first(x), self.gate
        for part in self.parts:
            x, gate = part(x, gate=gate)
        return F.mse_loss(self.last(x), y)

    def dataset(self):
        return OddMLP().dataset()


class DroppingParts(Parts):
    kind = DroppingPart


def plan_with(module, *, units, modes, sync, num_micro_batches, activations, prefetch="pre"):
    """A plan of `Parts` in which all blocks do the same; modes are taken in turn."""
    names = ["first", *(f"parts.{i}{held[0]}" for i in range(3) for held in UNITS[units]), "last"]
    chosen = {name: modes[index % len(modes)] for index, name in enumerate(names)}
    plan = plan_of(
        module,
        chosen,
        world_size=dist.get_world_size(),
        micro_batch_size=4,
        num_micro_batches=num_micro_batches,
        backward_prefetch=prefetch,
    )
    synced = tuple(dataclasses.replace(unit, sync=sync if unit.name else "every") for unit in plan.units)
    blocks = [Block(name=f"parts.{i}", activations=activations) for i in range(3) if activations != "keep"]
    return dataclasses.replace(plan, units=synced, blocks=tuple(blocks))


def stepped(root, plan, *, optimizer, batches):
    """Loss of each micro-batch."""
    losses, reduced_last = [], units_reduced_last(root, plan)
    for index, batch in enumerate(batches):
        place = index % plan.num_micro_batches
        is_last = place == plan.num_micro_batches - 1
        if place == 0:
            optimizer.zero_grad()
        with nullcontext() if is_last else without_reducing(reduced_last):
            loss = root(batch)
            loss.backward()
        losses.append(float(loss.detach()))
        if is_last:
            optimizer.step()
    return losses


def batches_of(module, number):
    loader = iter(module.loader(dist.get_rank(), dist.get_world_size()))
    return [next(loader) for _ in range(number)]


def made(kind=Parts, **choices):
    """A wrapped model, its plan and its optimizer."""
    module = kind().double()
    plan = plan_with(module, **choices)
    module.forward = module.loss
    root = apply_plan(module, plan, device=CPU)
    return root, plan, torch.optim.AdamW(root.parameters(), lr=1e-2)


def trained(kind=Parts, *, steps=4, **choices):
    """Losses, bytes left on the host, the last gradients and weights whole, buffers."""
    root, plan, optimizer = made(kind, **choices)
    torch.manual_seed(7 + dist.get_rank())
    losses = stepped(root, plan, optimizer=optimizer, batches=batches_of(kind(), steps * plan.num_micro_batches))
    with FullyShardedDataParallel.summon_full_params(root, with_grads=True):
        tensors = [tensor.detach().clone() for p in root.parameters() for tensor in (p, p.grad)]
    on_host = [torch.tensor(float(forward.memory.current_bytes)) for forward in block_forwards(root)][:1]
    left = on_host or [torch.zeros(())]  # not asserted here: other ranks would wait for this one
    return [torch.tensor(losses), *left, *tensors, *(buffer.clone() for buffer in root.buffers())]


def equals_keeping(cases, kind="Parts"):
    """Largest differences from units of whole blocks that keep what they save, and how far training moved."""
    kind, expected = globals()[kind], {}
    found = {}
    for name, choices in cases.items():
        number = choices["num_micro_batches"]
        if number not in expected:
            plain = {"units": "block", "modes": ("ZDP",), "sync": "every", "activations": "keep"}
            expected[number] = trained(kind, num_micro_batches=number, **plain)
        ours = trained(kind, **choices)
        found[name] = max(float((a - b).abs().max()) for a, b in zip(ours, expected[number], strict=True))
    return found
