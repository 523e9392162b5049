"""Models whose parameters are used elsewhere than the tree of modules says; and all models together."""

import random

import torch
import torch.nn.functional as F
from torch import nn

from tests.profiler.ordinary_models import ORDINARY, Bags, Model


class FunctionalTie(Model):
    """The embedding is the head too, without any parameter under two names; a list of prompts that only root reads."""

    def layers(self):
        self.tokens = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.holder = nn.Module()
        self.holder.prompts = nn.ParameterList([torch.zeros(8), torch.ones(8)])

    def training_step(self, batch, batch_idx):
        x = self.tokens(batch["x"]) + self.holder.prompts[0] + self.holder.prompts[1]
        return F.cross_entropy(F.linear(self.body(x), self.tokens.weight).flatten(0, 1), batch["x"].flatten())

    batch = staticmethod(Bags.batch)


class TiedInside(Model):
    """A tied weight below a module with parameters of its own: that module cannot be a unit."""

    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(8))
            self.inner = nn.Linear(8, 8)
            self.other = nn.Linear(8, 8)

        def forward(self, x):
            return self.other(self.inner(x)) * self.gain

    def layers(self):
        self.first, self.middle, self.head = nn.Linear(8, 8), self.Middle(), nn.Linear(8, 6)
        self.first.weight = self.middle.inner.weight

    def forward(self, x):
        return self.head(self.middle(self.first(x)))


class SharedModule(Model):
    """One layer registered in two blocks, and an alias of the second block."""

    def layers(self):
        shared = nn.Linear(8, 8)
        self.one = nn.Sequential(nn.Linear(8, 8), shared)
        self.two = nn.Sequential(shared, nn.Tanh(), nn.Linear(8, 6))
        self.alias = nn.ModuleList([self.two])

    def forward(self, x):
        return self.alias[0](self.one(x))


class SkipsLayers(Model):
    """Stochastic depth by ``random``, and by torch."""

    def layers(self):
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if (random.random() if index % 2 else float(torch.rand(()))) < 0.7:
                x = x + block(x)
        return self.head(x)


class OutsideItsParent(Model):
    """A part called past its parent's forward, before the parent's own call."""

    def layers(self):
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        return self.head(self.net(self.net[1](x)))


class ReturnsItsParameter(Model):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.randn(8))

        def forward(self):
            return self.value

    def layers(self):
        self.positions, self.head = self.Constant(), nn.Linear(8, 6)

    def forward(self, x):
        return self.head(x + self.positions())


ENTANGLED = (FunctionalTie, TiedInside, SharedModule, SkipsLayers, OutsideItsParent, ReturnsItsParameter)
MODELS = {model.__name__: model for model in (*ORDINARY, *ENTANGLED)}
