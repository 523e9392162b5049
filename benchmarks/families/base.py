"""Base of every family: seeded weights, one batch of any size, a choice of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

Batch: TypeAlias = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, lr=1e-3),
    "adamw_foreach": lambda parameters: AdamW(parameters, lr=1e-3, foreach=True),
    "sgd": lambda parameters: SGD(parameters, lr=1e-2),
    "sgd_momentum": lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9),
}
"""Optimizers that a family may be trained with, by name."""


class Family(pl.LightningModule):
    """A model with the batch that it trains on."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer_name = optimizer

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch, a float tensor without dimensions."""
        raise NotImplementedError

    def draw(self, num_samples: int) -> Batch:
        """Inputs and targets, with num_samples as their first dimension, from torch's default generator."""
        raise NotImplementedError

    def batch(self, num_samples: int, *, seed: int = 0) -> Batch:
        """Batch of a seed, equal each time, whatever was drawn before."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.draw(num_samples)

    def loader(self, num_samples: int, *, num_batches: int) -> DataLoader[Batch]:
        """One batch, given again and again: its bytes are counted once, however many are loaded ahead."""
        batches = [self.batch(num_samples)] * num_batches
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    @override
    def configure_optimizers(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer_name](p for p in self.parameters() if p.requires_grad)
