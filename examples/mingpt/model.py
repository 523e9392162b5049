"""The whole of minGPT: a decoder-only transformer that predicts the next token.

Sizes in the shape comments: B sequences, T tokens each, C = hidden_size, H heads of D = C / H, and
V = vocabulary_size. After Karpathy, https://github.com/karpathy/minGPT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Args:
        vocabulary_size: Number of different tokens; 256 for bytes.
        sequence_length: Longest context, in tokens.
        num_layers: Number of transformer blocks.
        num_heads: Attention heads a block; divides ``hidden_size``.
        hidden_size: Width of the residual stream.
        dropout: Probability of dropping an activation, in [0, 1).
    """

    vocabulary_size: int = 256
    sequence_length: int = 128
    num_layers: int = 4
    num_heads: int = 4
    hidden_size: int = 192
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary_size", "sequence_length", "num_layers", "num_heads", "hidden_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"Expected {name} of at least 1, got {getattr(self, name)!r}. Raise {name}.")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                "Expected hidden_size to be a multiple of num_heads, got "
                f"hidden_size={self.hidden_size!r} and num_heads={self.num_heads!r}. "
                "Change either one."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"Expected dropout in [0, 1), got {self.dropout!r}. Use 0.0 to switch it off.")


class CausalSelfAttention(nn.Module):
    """Every position attends to itself and to those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.proj_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes information across positions: (B, T, C) -> (B, T, C)."""
        batch, length, hidden = x.shape
        # (B, T, 3C) -> three of (B, H, T, D)
        query, key, value = (
            part.view(batch, length, self.num_heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(  # (B, H, T, D)
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, hidden)  # (B, T, C)
        output: Tensor = self.proj_dropout(self.proj(mixed))
        return output


class MLP(nn.Module):
    """Works on every position by itself, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.activation = nn.GELU(approximate="tanh")
        self.proj = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.proj_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transforms each position: (B, T, C) -> (B, T, 4C) -> (B, T, C)."""
        output: Tensor = self.proj_dropout(self.proj(self.activation(self.expand(x))))
        return output


class Block(nn.Module):
    """Attention, then MLP, each normalised on entry and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Adds to the residual stream: (B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class GPT(nn.Module):
    """Tokens in, logits of the next token out.

    Example:
        >>> model = GPT(GPTConfig(num_layers=1, num_heads=2, hidden_size=8))
        >>> model(torch.zeros(3, 5, dtype=torch.long)).shape
        torch.Size([3, 5, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary_size, config.hidden_size)
        self.position_embedding = nn.Embedding(config.sequence_length, config.hidden_size)
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocabulary_size, bias=False)
        self._initialize_weights()

    def _initialize_weights(self) -> None:
        """Draws weights as GPT-2: N(0, 0.02), and less for what enters the residual stream."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # 2 num_layers projections add up in the residual stream: keep its variance at 1
                residual = name.endswith(".proj")
                std = 0.02 / math.sqrt(2 * self.config.num_layers) if residual else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of the next token at every position.

        Args:
            tokens: (B, T) int64, T at most ``sequence_length``.

        Returns:
            (B, T, V), in the dtype of the head.

        Raises:
            ValueError: If T exceeds ``sequence_length``.
        """
        length = tokens.shape[1]
        if length > self.config.sequence_length:
            raise ValueError(
                f"Expected at most sequence_length={self.config.sequence_length} tokens, "
                f"got {length}. Crop the tokens or build the model with a longer sequence_length."
            )
        positions = torch.arange(length, device=tokens.device)  # (T,)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, C)
        x = self.embedding_dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))  # (B, T, V)
        return logits

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        num_new_tokens: int,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Returns ``tokens`` continued by ``num_new_tokens`` sampled ones.

        Args:
            tokens: (B, T) int64, the prompt, T at least 1. The model does not
                see what exceeds ``sequence_length``.
            num_new_tokens: How many tokens to append to each sequence.
            temperature: Divides the logits: below 1 safer text, above 1 wilder text.
            generator: Source of randomness; the global one by default.

        Returns:
            (B, T + num_new_tokens) int64.

        Raises:
            ValueError: If ``temperature`` is not positive.
        """
        if temperature <= 0.0:
            raise ValueError(
                f"Expected a positive temperature, got {temperature!r}. "
                "Use a small one, such as 0.01, for nearly greedy text."
            )
        for _ in range(num_new_tokens):
            logits = self(tokens[:, -self.config.sequence_length :])[:, -1]  # (B, V)
            probabilities = F.softmax(logits / temperature, dim=-1)
            next_token = torch.multinomial(probabilities, 1, generator=generator)  # (B, 1)
            tokens = torch.cat((tokens, next_token), dim=1)
        return tokens
