"""Models whose constructors and ``reset_parameters`` are told apart by where their tensors are created."""

import torch
import torch.nn.functional as F
from models import Base, build
from torch import nn

WIDTH, VOCABULARY, LAYERS = 64, 50, 12


class Scale(nn.Module):
    """A gain, and buffers of several dtypes, strides and sizes that ``reset_parameters`` computes."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.gain.no_decay = True
        self.register_buffer("ramp", torch.empty(4, width).t())
        self.register_buffer("mask", torch.empty(width, dtype=torch.bool), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int16))
        self.register_buffer("none", torch.empty(0))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.gain, mean=1.0)
        self.ramp.copy_(torch.arange(self.ramp.numel()).view_as(self.ramp))
        self.mask.copy_(torch.arange(len(self.mask)) % 2)
        self.count.fill_(3)

    def forward(self, x):
        return x * self.gain * self.mask + 1e-3 * self.ramp[:, self.count]


class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.scale = Scale(WIDTH)
        self.expand, self.proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x):
        return x + self.proj(F.gelu(self.expand(self.scale(x)))) * self.shared.offset


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self):
        self.offset.uniform_(0.9, 1.1)


class Net(nn.Module):
    """Blocks, a head tied to the embedding, a parameter in the root, a buffer that all blocks hold."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.empty(6, WIDTH))
        self.blocks = nn.ModuleList()
        for _ in range(LAYERS):
            shared = Shared()
            if len(self.blocks):
                shared.offset = self.blocks[0].shared.offset
            self.blocks.append(Block(shared))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens):
        x = 0.1 * self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), (tokens * 3 + 1).remainder(VOCABULARY).flatten())


class InitialisesAll(Net):
    def reset_parameters(self):
        for child in self.modules():
            if isinstance(child, nn.Linear) and child.bias is not None:
                nn.init.zeros_(child.bias)


class Recurrent(nn.Module):
    """Modules that keep references to their parameters, or that initialise those of their children."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(self.lstm(x)[0])


class Evaluated(Base):
    """A LightningModule around the same, created by configure_model."""

    def configure_model(self):
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
                self.net[2].weight = self.net[0].weight

    def loss(self, batch):
        return F.mse_loss(self.net(batch[0].float())[:, :3], batch[1].float())

    def dataset(self):
        return build("odd_mlp").dataset()
