"""Blocks that recompute or offload, as the ranks run them: many plans per launch, against one process without FSDP."""

import dataclasses
import itertools
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "profiler"))

from cases import largest_difference
from models import Base, OddMLP
from wrapped import whole
from wrapped_units import block_forwards

from benchmarks.testbed.plans import plan_of
from lightning_osdp.apply import ShardedModel
from lightning_osdp.core.modes import ACTIVATION_CHOICES
from lightning_osdp.core.plans.plan import Block
from lightning_osdp.splitting import cuts_of

CPU = torch.device("cpu")
STEPS = 2
"""fairscale's form runs from the second one on."""
BLOCKS = ["pair.before", "pair.after", "alone"]
UNITS = {
    "root only": [],
    "two blocks": ["first", "pair", "alone", "last"],
    "block": ["first", *BLOCKS, "last"],
    "both": ["first", *(name for block in BLOCKS for name in (block, f"{block}.up")), "last"],
    "operators": ["first", *(f"{block}.{name}" for block in BLOCKS for name in ("norm", "up", "down")), "last"],
}
"""What is wrapped besides the root."""
MODES = {"ZDP": ["ZDP"], "DP": ["DP"], "mixed": ["DP", "ZDP"]}
"""Of units, in turn."""
SLICES = {"up": ("ZDP", "DP", "ZDP"), "down": ("DP", "ZDP")}
"""Of operators that are units, under the modes "slices"; other units have mixed ones."""
POLICIES = {choice: [choice] * 3 for choice in ACTIVATION_CHOICES} | {
    "mixed": ["recompute", "keep", "recompute_offload"],
    "mixed, offload first": ["offload", "recompute_offload", "recompute"],
}
"""What blocks do."""


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


def all_choices(activations, workloads):
    """All units with all modes that they can have; kinds of models and workloads in turn, others for each policy."""
    modes = {"root only": ["ZDP"], "both": [*MODES, "slices"], "operators": [*MODES, "slices"]}
    pairs = [(units, mode) for units in UNITS for mode in modes.get(units, MODES)]
    in_turn = itertools.cycle(itertools.product((Parts, DroppingParts), workloads))
    in_turn = itertools.islice(in_turn, list(POLICIES).index(activations), None)
    return [
        {"kind": kind, "units": units, "modes": mode, "num_micro_batches": number, "sync": sync}
        for (units, mode), (kind, (number, sync)) in zip(pairs, in_turn, strict=False)
    ]


def plan_with(module, activations, *, units, modes, num_micro_batches, sync):
    """A plan of `Parts`."""
    chosen = dict(zip(UNITS[units], itertools.cycle(MODES.get(modes, MODES["mixed"])), strict=False))
    if modes == "slices":
        chosen |= {name: SLICES[kind] for name in chosen if (kind := name.rpartition(".")[2]) in SLICES}
    world_size = dist.get_world_size()
    plan = plan_of(module, chosen, world_size=world_size, micro_batch_size=4, num_micro_batches=num_micro_batches)
    synced = tuple(dataclasses.replace(unit, sync=sync if unit.name else "every") for unit in plan.units)
    blocks = [Block(name=name, activations=choice) for name, choice in zip(BLOCKS, POLICIES[activations], strict=True)]
    blocks = tuple(block for block in blocks if block.activations != "keep")
    return dataclasses.replace(plan, units=synced, blocks=blocks)


def batches_of(module, rank, number):
    loader = iter(module.loader(rank, dist.get_world_size()))
    return [next(loader) for _ in range(number)]


def trained(activations, *, kind, num_micro_batches, **choices):
    """Losses, bytes left on the host, the last gradients and weights whole, buffers, by name."""
    module = kind().double()
    plan = plan_with(module, activations, num_micro_batches=num_micro_batches, **choices)
    module.forward = module.loss
    sharded = ShardedModel.planned(module, plan, device=CPU)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    batches, losses = batches_of(module, dist.get_rank(), STEPS * num_micro_batches), []
    torch.manual_seed(7 + dist.get_rank())  # last: a loader draws a number, too
    for index, batch in enumerate(batches):
        is_last = (index + 1) % num_micro_batches == 0
        with nullcontext() if is_last else sharded.accumulating():
            loss = module(batch) / num_micro_batches
            loss.backward()
        losses.append(loss.detach())
        if is_last:
            optimizer.step()
        if is_last and len(losses) < STEPS * num_micro_batches:
            optimizer.zero_grad()
    weights, gradients = whole(module)
    for cut in cuts_of(module):
        for tensors in (weights, gradients):
            tensors[cut.whole] = cut.join([tensors.pop(piece) for piece in cut.pieces])
    memory = next((forward.memory.current_bytes for forward in block_forwards(module)), 0)
    return found_in(module, losses, memory, weights, gradients)


def found_in(module, losses, left_on_host_bytes, weights, gradients):
    return {
        "losses": torch.stack(losses),
        "left on the host": torch.tensor(float(left_on_host_bytes)),  # not asserted: other ranks would wait
        **weights,
        **{f"gradient of {name}": gradient for name, gradient in gradients.items()},
        **dict(module.named_buffers()),
    }


def alone(kind, num_micro_batches):
    """The same of plain modules, one for each rank, of which this process takes mean gradients."""
    world_size = dist.get_world_size()
    modules = [kind().double() for _ in range(world_size)]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in modules]
    given = [batches_of(module, rank, STEPS * num_micro_batches) for rank, module in enumerate(modules)]
    random = [torch.Generator().manual_seed(7 + rank).get_state() for rank in range(world_size)]
    losses = []
    for step in range(STEPS):
        for rank, module in enumerate(modules):
            module.zero_grad()
            torch.set_rng_state(random[rank])
            for batch in given[rank][step * num_micro_batches : (step + 1) * num_micro_batches]:
                loss = module.loss(batch) / num_micro_batches
                loss.backward()
                if rank == dist.get_rank():
                    losses.append(loss.detach())
            random[rank] = torch.get_rng_state()
        for parameters in zip(*(module.parameters() for module in modules), strict=True):
            mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
            for parameter in parameters:
                parameter.grad = mean
        for optimizer in optimizers:
            optimizer.step()
    own = modules[dist.get_rank()]
    weights = {name: p.detach() for name, p in own.named_parameters()}
    gradients = {name: p.grad for name, p in own.named_parameters()}
    return found_in(own, losses, 0, weights, gradients)


def differences_from_one_process(activations, workloads):
    """Largest difference of each plan from one process in which blocks keep what they save.

    Args:
        activations: one of `POLICIES`.
        workloads: numbers of micro-batches in a step, and which of them reduce.
    """
    expected, found = {}, {}
    for choices in all_choices(activations, workloads):
        kind, number = choices["kind"], choices["num_micro_batches"]
        if (kind, number) not in expected:
            expected[kind, number] = alone(kind, number)
        ours = trained(activations, **choices)
        name = "-".join([kind.__name__, *(str(value) for key, value in choices.items() if key != "kind")])
        found[name] = largest_difference(dict(sorted(ours.items())), dict(sorted(expected[kind, number].items())))
    return found
