"""Families of plain layers: of sizes that nothing divides, and large ones, on which splitting is measured."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.families.base import Batch, Family


class OddMLP(Family):
    """Prime widths, layers of very different size, a scalar parameter in the root, a buffer."""

    widths: ClassVar[tuple[int, ...]] = (331, 1009, 1511, 773, 1, 617, 83)
    shift: Tensor

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=b != 773) for a, b in pairwise(self.widths))
        self.norms = nn.ModuleList(nn.LayerNorm(b) if b > 1 else nn.Identity() for b in self.widths[1:-1])
        self.scale = nn.Parameter(torch.ones(()).reshape(1))
        self.register_buffer("shift", torch.full((self.widths[-1],), 0.1))

    @override
    def loss(self, batch: Batch) -> Tensor:
        x = batch[0]
        for layer, norm in zip(self.layers[:-1], self.norms, strict=True):
            x = F.gelu(norm(layer(x)))
        return F.mse_loss(self.layers[-1](x) * self.scale + self.shift, batch[1])

    @override
    def draw(self, num_samples: int) -> Batch:
        inputs = torch.randn(num_samples, self.widths[0])
        return inputs, inputs[:, : self.widths[-1]].sin()


class TwoLayers(Family):
    """Two Linears of the same width, as many rows as samples.

    Their input needs a gradient, as one that other layers hand on does. Where none does, ``fully_shard`` is not told
    that backward is through with a unit: all slices of a model's first layer would stay to the end of backward.
    """

    def __init__(self, hidden_size: int, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.hidden_size = hidden_size
        self.layers = nn.Sequential(*(nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(2)))

    @override
    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.layers(batch[0].detach().requires_grad_()), batch[1])

    @override
    def draw(self, num_samples: int) -> Batch:
        return torch.randn(num_samples, self.hidden_size), torch.randn(num_samples, self.hidden_size)
