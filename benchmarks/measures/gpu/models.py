"""Models of the checks: families of a kind each, with batches that fill a GPU or that a CPU is through with soon."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from benchmarks.families import Batch, Family, build

NAMES = ("mlp", "gpt", "cnn", "lstm")
_FAMILIES = {"mlp": "odd_mlp", "gpt": "mingpt", "cnn": "convolutional"}
_NUM_SAMPLES = {"cuda": 64, "cpu": 2}
NUM_TIMED = {"cuda": 4096, "cpu": 2}
"""Samples of a batch whose step is timed: with fewer, the host takes longer to launch kernels than a GPU takes."""


class Recurrent(Family):
    """Two layers of an LSTM over sequences of T features, which predict the next ones."""

    length, num_features, hidden_size = 32, 64, 192

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.lstm = nn.LSTM(self.num_features, self.hidden_size, num_layers=2, batch_first=True)
        self.head = nn.Linear(self.hidden_size, self.num_features)

    @override
    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.head(self.lstm(batch[0])[0]), batch[1])

    @override
    def draw(self, num_samples: int) -> Batch:
        x = torch.randn(num_samples, self.length + 1, self.num_features)
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def made(name: str) -> Family:
    """A model on CPU, with the weights of a seed."""
    if name in _FAMILIES:
        return build(_FAMILIES[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Recurrent()


def num_samples_on(device: torch.device) -> int:
    """Number of samples of a batch."""
    return _NUM_SAMPLES[device.type]


def batch_on(device: torch.device, module: Family, num_samples: int | None = None) -> Batch:
    """A batch of so many samples, by default `num_samples_on`, on the device."""
    drawn = module.batch(num_samples or num_samples_on(device))
    batch: Batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), drawn)
    return batch


def unit_names(module: Family) -> list[str]:
    """Modules that are made units of: in containers of several, or children."""
    lists = [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1
    ]
    outer = [name for name, _ in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    names = [f"{name}.{key}" for name, child in lists if name in outer for key, _ in child.named_children()]
    own = names or [name for name, _ in module.named_children()]
    return [name for name in own if any(True for _ in module.get_submodule(name).parameters())]
