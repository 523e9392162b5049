"""A family of plain layers whose sizes nothing divides."""

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
