"""A Linear with a transposed weight, as transformers has it for GPT-2, which need not be installed here."""

import torch
from torch import nn

from lightning_osdp.operations.splitting.splitters import SPLITTERS, SplitConv1D


class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(0.02 * torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


SPLITTERS[f"{Conv1D.__module__}.Conv1D"] = SplitConv1D
