"""Small models of the kinds that users have, as LightningModules with their own loader."""

from itertools import pairwise

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_SAMPLES = 160
BATCH_SIZE = 4
"""Samples of a micro-batch on each rank."""


class Base(L.LightningModule):
    """Loss, optimizer and an unshuffled loader that gives rank r of N the samples r, r + N, r + 2N, ..."""

    def __init__(self, optimizer="adamw"):
        super().__init__()
        torch.manual_seed(0)
        self.optimizer_name = optimizer
        self.found = []

    @property
    def losses(self):
        """Losses of each step, read afterwards: a step that reads values is not traced on fake tensors."""
        return [float(loss) for loss in self.found]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.found.append(loss.detach().clone())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-2)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def dataset(self):
        raise NotImplementedError

    def loader(self, rank, world_size, batch_size=BATCH_SIZE):
        sampler = DistributedSampler(self.dataset(), world_size, rank, shuffle=False)
        return DataLoader(self.dataset(), batch_size=batch_size, sampler=sampler)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            s.view(b, t, self.heads, c // self.heads).transpose(1, 2) for s in self.qkv(self.ln_1(x)).split(c, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class GPT(Base):
    """minGPT in small; ``tied`` shares the embedding with the head."""

    def __init__(self, optimizer="adamw", *, tied=False, width=24, layers=2, length=8, vocabulary=40):
        super().__init__(optimizer)
        self.length, self.vocabulary = length, vocabulary
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.blocks = nn.ModuleList([Block(width, 4) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def loss(self, batch):
        x = self.tokens(batch[0]) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[1].flatten())

    def dataset(self):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, self.vocabulary, (NUM_SAMPLES, self.length), generator=generator)
        return TensorDataset(tokens, (tokens * 3 + 1) % self.vocabulary)


class OddMLP(Base):
    """Sizes that no number of ranks divides, one layer without bias, a buffer, and a scalar parameter."""

    scale_shape = ()

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.layers = nn.Sequential(
            nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11, bias=False), nn.Tanh(), nn.Linear(11, 5), nn.Tanh()
        )
        self.scale = nn.Parameter(torch.ones(self.scale_shape))
        self.last = nn.Linear(5, 3)
        self.register_buffer("shift", torch.full((3,), 0.1))

    def loss(self, batch):
        x, y = (t.to(self.shift.dtype) for t in batch)
        return F.mse_loss(self.last(self.layers(x)) * self.scale + self.shift, y)

    def dataset(self):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(NUM_SAMPLES, 7, generator=generator, dtype=torch.float64)
        return TensorDataset(x, x[:, :3].sin())


class TiedGPT(GPT):
    """GPT whose head is the embedding."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer, tied=True)


MODELS = {"gpt": GPT, "odd_mlp": OddMLP, "tied_gpt": TiedGPT}


def build(name, optimizer="adamw", dtype="float32"):
    return MODELS[name](optimizer).to(getattr(torch, dtype))


class WideMLP(Base):
    """Parameters outweigh activations: what gathers and gradients take decides the peak."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        widths = [256, 384, 512, 512, 320, 64]
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))

    def loss(self, batch):
        return F.mse_loss(
            self.layers(batch[0].to(self.layers[0].weight.dtype)), batch[1].to(self.layers[0].weight.dtype)
        )

    def dataset(self):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(NUM_SAMPLES, 256, generator=generator)
        return TensorDataset(x, x[:, :64].sin())


class WideGPT(GPT):
    """A vocabulary larger than the body."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer, width=96, layers=3, length=16, vocabulary=2000)


class WideGated(WideMLP):
    """A layer, and a gated MLP."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.layers = nn.Linear(256, 384)
        self.gate, self.up, self.down = nn.Linear(384, 512), nn.Linear(384, 512), nn.Linear(512, 64)

    def loss(self, batch):
        x, y = (tensor.to(self.layers.weight.dtype) for tensor in batch)
        x = self.layers(x)
        return F.mse_loss(self.down(F.silu(self.gate(x)) * self.up(x)), y)


class WideAttention(WideMLP):
    """A layer, attention of samples to each other with three projections of one input, and a layer."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.layers = nn.Linear(256, 384)
        self.query, self.key, self.value = nn.Linear(384, 512), nn.Linear(384, 512), nn.Linear(384, 320, bias=False)
        self.last = nn.Linear(320, 64)

    def loss(self, batch):
        x, y = (tensor.to(self.layers.weight.dtype) for tensor in batch)
        x = torch.tanh(self.layers(x))
        query, key, value = self.query(x), self.key(x), self.value(x)
        return F.mse_loss(self.last(torch.softmax(query @ key.mT, -1) @ value), y)


class Heads(nn.Module):
    """Attention with rotary positions, normalized queries, and half as many heads of keys and values as of queries."""

    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.size, self.dropout, self.mask = width // heads, dropout, None
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width // 2, bias=False)
        self.value, self.output = nn.Linear(width, width // 2), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(self.size))

    def forward(self, x):
        query, key, value = (
            each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        angles = torch.arange(x.shape[1])[:, None] / torch.arange(1, self.size // 2 + 1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        query = F.layer_norm(query, (self.size,)) * self.scale
        for_turning = (query, key)
        turned = []
        for each in for_turning:
            first, second = each.chunk(2, -1)
            turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))
        dropout = self.dropout if self.training else 0.0
        attended = {"attn_mask": self.mask, "is_causal": self.mask is None, "dropout_p": dropout}
        mixed = F.scaled_dot_product_attention(*turned, value, enable_gqa=True, **attended)
        return self.output(mixed.transpose(1, 2).flatten(2))


class HeadsOfOne(nn.Module):
    """Attention whose queries, keys and values one operator makes; ``by_head``: those of a head beside each other."""

    def __init__(self, width, heads, *, by_head=False):
        super().__init__()
        self.heads, self.qkv, self.output = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.by_head = by_head

    def forward(self, x):
        made = self.qkv(x)
        if self.by_head:
            query, key, value = made.unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        else:
            query, key, value = made.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Attending(GPT):
    """minGPT in small whose blocks are attention by itself."""

    def __init__(self, optimizer="adamw", *, width=32, heads=8, **sizes):
        super().__init__(optimizer, width=width, layers=2, **sizes)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), Heads(width, heads)) for _ in range(2)])


class WideAttending(Attending):
    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer, width=96, length=16, vocabulary=200)


class WideAttendingOfOne(GPT):
    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer, width=96, layers=2, length=16, vocabulary=200)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(96), HeadsOfOne(96, 8)) for _ in range(2)])


class GatedByOne(nn.Module):
    """A gated MLP, of which one operator makes gates and values."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class AttendingByHead(GPT):
    """Blocks of attention that is made head by head, and gated MLPs of two operators."""

    def __init__(self, optimizer="adamw", *, width=32, heads=8, **sizes):
        super().__init__(optimizer, width=width, layers=2, **sizes)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(width), HeadsOfOne(width, heads, by_head=True), GatedByOne(width, 2 * width))
                for _ in range(2)
            ]
        )


class WideAttendingByHead(AttendingByHead):
    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer, width=96, length=16, vocabulary=200)


MODELS |= {"wide_attending": WideAttending, "wide_attending_of_one": WideAttendingOfOne}
MODELS |= {"wide_attending_by_head": WideAttendingByHead}
MODELS |= {"wide_mlp": WideMLP, "wide_gpt": WideGPT, "wide_gated": WideGated, "wide_attention": WideAttention}
