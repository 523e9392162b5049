"""Families that read tokens: B sequences of T tokens, out of a vocabulary of V, C wide."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from benchmarks.families.base import Batch, Family
from examples.mingpt.model import GPT, GPTConfig


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of (B, T, V) logits and (B, T) tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class MinGPT(Family):
    """The decoder-only transformer of examples/mingpt."""

    config = GPTConfig(vocabulary_size=512, sequence_length=64, num_layers=4, num_heads=4, hidden_size=256)

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model = GPT(self.config)

    @override
    def loss(self, batch: Batch) -> Tensor:
        return next_token_loss(self.model(batch[0]), batch[1])

    @override
    def draw(self, num_samples: int) -> Batch:
        size = (num_samples, self.config.sequence_length + 1)
        tokens = torch.randint(self.config.vocabulary_size, size)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class TiedGPT(MinGPT):
    """A GPT whose head is its token embedding."""

    config = GPTConfig(vocabulary_size=4000, sequence_length=48, num_layers=3, num_heads=6, hidden_size=192)

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.head.weight = self.model.token_embedding.weight


class LargeVocabulary(MinGPT):
    """Embedding, head and logits outweigh the body by far."""

    config = GPTConfig(vocabulary_size=24000, sequence_length=32, num_layers=2, num_heads=2, hidden_size=64)


class LlamaLayer(nn.Module):
    """Attention with rotary positions and grouped keys and values, then a gated MLP: (B, T, C) -> (B, T, C)."""

    def __init__(self, hidden_size: int, num_heads: int, num_groups: int, mlp_size: int) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        grouped_size = num_groups * self.head_size
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)
        self.query, self.output = (nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(hidden_size, grouped_size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(hidden_size, mlp_size, bias=False) for _ in range(2))
        self.down = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Adds to the residual stream."""
        normed = self.attention_norm(x)
        query, key, value = (
            projected(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (B, h, T, D)
            for projected in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True, enable_gqa=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        output: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return output


def _rotated(x: Tensor) -> Tensor:
    """Turns pairs of features by angles that grow with their position: (B, h, T, D) -> (B, h, T, D)."""
    length, size = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(length, device=x.device)[:, None] * rates  # (T, D / 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class LlamaLike(Family):
    """A decoder as Llama's are, without biases, and with a head of its own."""

    vocabulary_size, length, num_layers, hidden_size, mlp_size, num_heads, num_groups = 512, 64, 4, 256, 688, 8, 2

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(self.vocabulary_size, self.hidden_size)
        sizes = (self.hidden_size, self.num_heads, self.num_groups, self.mlp_size)
        self.layers = nn.ModuleList(LlamaLayer(*sizes) for _ in range(self.num_layers))
        self.norm = nn.RMSNorm(self.hidden_size)
        self.head = nn.Linear(self.hidden_size, self.vocabulary_size, bias=False)

    @override
    def loss(self, batch: Batch) -> Tensor:
        x = self.tokens(batch[0])  # (B, T, C)
        for layer in self.layers:
            x = layer(x)
        return next_token_loss(self.head(self.norm(x)), batch[1])

    @override
    def draw(self, num_samples: int) -> Batch:
        tokens = torch.randint(self.vocabulary_size, (num_samples, self.length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Encoder(Family):
    """torch's own encoder layers with dropout, under a classifier of the first position."""

    vocabulary_size, length, hidden_size, num_classes = 2000, 64, 256, 5

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(self.vocabulary_size, self.hidden_size)
        self.positions = nn.Parameter(0.02 * torch.randn(self.length, self.hidden_size))
        layer = nn.TransformerEncoderLayer(
            self.hidden_size, nhead=4, dim_feedforward=4 * self.hidden_size, dropout=0.1, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=4)
        self.classifier = nn.Linear(self.hidden_size, self.num_classes)

    @override
    def loss(self, batch: Batch) -> Tensor:
        x = self.layers(self.tokens(batch[0]) + self.positions)  # (B, T, C)
        return F.cross_entropy(self.classifier(x[:, 0]), batch[1])

    @override
    def draw(self, num_samples: int) -> Batch:
        tokens = torch.randint(self.vocabulary_size, (num_samples, self.length))
        return tokens, torch.randint(self.num_classes, (num_samples,))


class CrossAttention(nn.Module):
    """Every position attends to all of another sequence: (B, T, C), (B, S, C) -> (B, T, C)."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key_value = nn.Linear(hidden_size, 2 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, memory: Tensor, *, is_causal: bool = False) -> Tensor:
        """Mixes the memory into x."""
        parts = (self.query(x), *self.key_value(memory).chunk(2, dim=-1))
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)  # (B, h, T, D)
        output: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return output


class DecoderLayer(nn.Module):
    """Attention within the target, then to the source, then an MLP, each normalised on entry."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.self_norm, self.self_attention = nn.LayerNorm(hidden_size), CrossAttention(hidden_size, num_heads)
        self.cross_norm, self.cross_attention = nn.LayerNorm(hidden_size), CrossAttention(hidden_size, num_heads)
        self.mlp_norm, self.expand = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(3 * hidden_size, hidden_size)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Adds to the target's residual stream: (B, T, C), (B, S, C) -> (B, T, C)."""
        normed = self.self_norm(x)
        x = x + self.self_attention(normed, normed, is_causal=True)
        x = x + self.cross_attention(self.cross_norm(x), memory)
        output: Tensor = x + self.proj(F.silu(self.expand(self.mlp_norm(x))))
        return output


class EncoderDecoder(Family):
    """torch's encoder, whose output every layer of a decoder reads."""

    source_size, target_size, source_length, target_length, hidden_size = 1500, 900, 48, 33, 192

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.source = nn.Embedding(self.source_size, self.hidden_size)
        self.target = nn.Embedding(self.target_size, self.hidden_size)
        layer = nn.TransformerEncoderLayer(
            self.hidden_size, nhead=4, dim_feedforward=512, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)
        self.decoder = nn.ModuleList(DecoderLayer(self.hidden_size, num_heads=4) for _ in range(3))
        self.norm = nn.LayerNorm(self.hidden_size)
        self.head = nn.Linear(self.hidden_size, self.target_size)

    @override
    def loss(self, batch: Batch) -> Tensor:
        source, target = batch
        memory = self.encoder(self.source(source))
        x = self.target(target[:, :-1])
        for layer in self.decoder:
            x = layer(x, memory)
        return next_token_loss(self.head(self.norm(x)), target[:, 1:])

    @override
    def draw(self, num_samples: int) -> Batch:
        source = torch.randint(self.source_size, (num_samples, self.source_length))
        return source, torch.randint(self.target_size, (num_samples, self.target_length))
