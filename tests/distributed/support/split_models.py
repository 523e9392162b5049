"""A model of all kinds of operators that can be split, plans for it, and what its checkpoints are compared by."""

import dataclasses
import runpy
import sys
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import TensorDataset

from benchmarks.testbed.plans import plan_of
from tests.distributed.support.models import NUM_SAMPLES, Base
from tests.support.transposed import Conv1D

VOCABULARY, WIDTH, INNER = 19, 14, 23


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), Conv1D(WIDTH, INNER)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SplitNet(Base):
    def __init__(self, optimizer="adamw", *, is_checkpointed=False, num_blocks=2):
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        if is_checkpointed:
            self.blocks[-1] = checkpoint_wrapper(self.blocks[-1])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def loss(self, batch):
        x = self.tokens(batch[0])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.frozen(x)).flatten(0, 1), batch[1].flatten())

    def dataset(self):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, 6), generator=generator)
        return TensorDataset(tokens, (tokens * 3 + 1) % VOCABULARY)

    def configure_optimizers(self):
        """Biases and norms without weight decay and first, so not in the model's order; frozen parameters are in it."""
        names = dict(self.named_parameters())
        plain = [name for name in names if name.endswith("bias") or ".norm." in name]
        groups = [
            {"params": [names[name] for name in plain], "weight_decay": 0.0},
            {"params": [p for name, p in names.items() if name not in plain], "weight_decay": 0.1},
        ]
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(groups, lr=1e-2)
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9 if self.optimizer_name == "sgd" else 0.0)


KINDS = {"four": 4, "three": 3, "whole": 1}
"""Slices of each operator."""


def split_plan(kind, module, world_size, num_micro_batches=1, *, is_shifted=False):
    """Slices of both modes in each operator; every other one reduces in the last micro-batch only.

    The blocks' norms are in the root. Shifted, each operator has the modes of the one after it.
    """
    slices = KINDS[kind]
    operators = [name for name, child in module.named_modules() if isinstance(child, nn.Linear | nn.Embedding | Conv1D)]
    pattern = ("ZDP", "DP", "ZDP", "ZDP")
    modes = {name: pattern[(index + is_shifted) % 2 :][:slices] for index, name in enumerate(operators)}
    modes = {name: (*chosen, *("DP",) * (slices - len(chosen))) for name, chosen in modes.items()}
    plan = plan_of(module, modes, world_size=world_size, micro_batch_size=4, num_micro_batches=num_micro_batches)
    units = (
        unit.treated(sync="last" if num_micro_batches > 1 and index % 2 else "every")
        for index, unit in enumerate(plan.units)
    )
    return dataclasses.replace(plan, units=tuple(units))


def in_nodes(plan):
    """Puts a plan into nodes of two ranks, in each of which the root and every other unit are sharded."""
    in_each = {"ZDP": "HSDP", "DP": "HDP"}
    units = [
        unit.in_modes(*tuple(map(in_each.get, unit.modes))) if index % 2 == 0 else unit
        for index, unit in enumerate(plan.units)
    ]
    return dataclasses.replace(plan, units=tuple(units), node_size=2)


def consolidate(path):
    """Consolidates as ``python -m lightning.pytorch.utilities.consolidate_checkpoint`` does."""
    with mock.patch.object(sys, "argv", ["consolidate", str(path)]):
        runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")


class AtStart(L.Callback):
    """Calls something when everything is restored and nothing is trained."""

    def __init__(self, call):
        self.call = call

    def on_train_start(self, trainer, pl_module):
        self.call(trainer)


def differing(trainer, expected):
    """Returns names in model and optimizer that are not bit for bit as in a plain checkpoint (rank 0)."""
    state = trainer.strategy.lightning_module_state_dict()
    optimizer = trainer.strategy.optimizer_state(trainer.optimizers[0])
    return [] if dist.get_rank() else unequal({"state_dict": state, "optimizer_states": [optimizer]}, expected)


def unequal(found, expected):
    """Names of entries that differ from a plain checkpoint's."""
    wrong = []
    if list(found["state_dict"]) != list(expected["state_dict"]):
        wrong.append("names")
    wrong += [n for n, v in expected["state_dict"].items() if not torch.equal(found["state_dict"][n], v)]
    (a,), (b,) = found["optimizer_states"], expected["optimizer_states"]
    if a["param_groups"] != b["param_groups"] or set(a["state"]) != set(b["state"]):
        wrong.append(f"groups: {a['param_groups']} {list(a['state'])} for {b['param_groups']} {list(b['state'])}")
    for number, fields in b["state"].items():
        same = set(a["state"][number]) == set(fields)
        if not same or not all(torch.equal(a["state"][number][name], value) for name, value in fields.items()):
            wrong.append(f"state {number}")
    return wrong
