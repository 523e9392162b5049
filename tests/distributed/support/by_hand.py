"""Models that step their optimizers themselves, and their fits under the strategy and under DDP."""

import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_osdp import OSDPStrategy, SearchSpace
from tests.distributed.support.fits import largest_difference
from tests.distributed.support.models import Base, build

SPACE = SearchSpace(min_unit_bytes=0)


class GAN(Base):
    """Two optimizers that take turns, each with the other's parameters frozen."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Sequential(nn.Linear(13, 7), nn.Tanh()))
        self.discriminator = nn.ModuleDict({"body": nn.Linear(7, 11), "head": nn.Linear(11, 1)})
        self.register_buffer("one", torch.ones(1))

    def judged(self, x):
        return self.discriminator["head"](self.discriminator["body"](x).relu())

    def entropy(self, x, label):
        judged = self.judged(x)
        return F.binary_cross_entropy_with_logits(judged, torch.full_like(judged, label) * self.one)

    def training_step(self, batch, batch_idx):
        real = batch[0].float()
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.entropy(self.generator(real.flip(1)), 1.0)
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        other = self.entropy(real, 1.0) + self.entropy(self.generator(real.flip(1)).detach(), 0.0)
        self.manual_backward(other)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.found += [loss.detach().clone(), other.detach().clone()]

    def validation_step(self, batch, batch_idx):
        self.found.append(self.entropy(batch[0].float(), 1.0))

    def configure_optimizers(self):
        discriminator = torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.generator.parameters(), lr=1e-3), discriminator

    def dataset(self):
        return build("odd_mlp").dataset()


class One(GAN):
    """GAN with one optimizer, which steps in every second batch."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.entropy(self.generator(batch[0].float()), 1.0)
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        self.found.append(loss.detach().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def ddp():
    return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)


def ours(**options):
    return lambda: OSDPStrategy(search_space=SPACE, **options)


def compared(found, expected):
    """Largest difference of losses and weights."""
    pairs = zip(found[0].losses, expected[0].losses, strict=True)
    return max(*(abs(a - b) for a, b in pairs), largest_difference(found[1], expected[1]))
