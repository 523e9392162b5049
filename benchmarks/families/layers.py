"""Nothing but large layers: what splitting is measured on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.families.base import Batch, Family


class TwoLayers(Family):
    """Two Linears of the same width, as many rows as samples.

    Their input needs a gradient, as one that other layers hand on does. Where none does, ``fully_shard`` is not told
    that backward is through with a unit: all slices of a model's first layer would stay to the end of backward.

    Args:
        hidden_size: features in and out.
        optimizer: a name of `OPTIMIZERS`.
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
