"""A model that is written where it is tested."""

import torch
from torch import nn


class Net(nn.Module):
    """Modules by name, and a forward, which is the training step too, as a function of the net and its input."""

    def __init__(self, run, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.run = run

    def forward(self, x):
        return self.run(self, x)

    def training_step(self, batch, batch_idx):
        return self.run(self, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def linear():
    return nn.Linear(4, 4)
