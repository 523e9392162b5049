"""A family whose bytes can be added up by hand."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.families import Family
from benchmarks.testbed.plans import plan_of

WIDTH = 256
LAYER_BYTES = 4 * WIDTH * WIDTH


class Linears(Family):
    """Three layers of LAYER_BYTES, nothing in the root, activations of a kilobyte."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def loss(self, batch):
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, batch[1])

    def draw(self, num_samples):
        return torch.randn(num_samples, WIDTH), torch.randn(num_samples, WIDTH)


def plan_for_linears(modes, *, world_size, num_micro_batches=1):
    """A plan with modes such as "DZD", one sample a micro-batch."""
    names = {"D": "DP", "Z": "ZDP"}
    units = {f"layers.{i}": names[letter] for i, letter in enumerate(modes)}
    return plan_of(Linears(), units, world_size=world_size, micro_batch_size=1, num_micro_batches=num_micro_batches)
