"""Transformers of different shapes, for links that are slow and cores that are few: what the benchmarks time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.families.base import Batch, Family
from benchmarks.families.text import MinGPT, next_token_loss
from examples.mingpt.model import Block, GPTConfig


class GPT6x512(MinGPT):
    """19 million parameters, nearly all of them in six blocks."""

    config = GPTConfig(sequence_length=128, num_layers=6, num_heads=8, hidden_size=512)


class TinyGPT(MinGPT):
    """As quick as can be."""

    config = GPTConfig(vocabulary_size=32, sequence_length=16, num_layers=3, num_heads=2, hidden_size=32)


class GPT12x256(MinGPT):
    """Ten million parameters in twelve blocks."""

    config = GPTConfig(vocabulary_size=256, sequence_length=128, num_layers=12, num_heads=4, hidden_size=256)


class GPT3x1024(MinGPT):
    """38 million parameters in three blocks."""

    config = GPTConfig(vocabulary_size=256, sequence_length=128, num_layers=3, num_heads=8, hidden_size=1024)


class GPT24x128(MinGPT):
    """The paper's narrow and deep one, 96 layers of 1024, in 1/256 of its parameters: layers / 4, width / 8."""

    config = GPTConfig(vocabulary_size=256, sequence_length=128, num_layers=24, num_heads=4, hidden_size=128)


class GPT2x768(MinGPT):
    """The paper's wide and shallow one, two layers of 12288, in 1/256 of its parameters: width / 16."""

    config = GPTConfig(vocabulary_size=256, sequence_length=128, num_layers=2, num_heads=8, hidden_size=768)


class Growing(Family):
    """Blocks of growing widths, with a projection where the width changes."""

    widths: tuple[int, ...] = (256, 256, 256, 512, 512, 768, 768)
    vocabulary_size, length = 256, 128

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(self.vocabulary_size, self.widths[0])
        self.blocks = nn.ModuleList(Block(GPTConfig(num_heads=4, hidden_size=width)) for width in self.widths)
        self.changes = nn.ModuleList(
            nn.Identity() if old == new else nn.Linear(old, new) for old, new in pairwise(self.widths)
        )
        self.head = nn.Linear(self.widths[-1], self.vocabulary_size)

    @override
    def loss(self, batch: Batch) -> Tensor:
        x = self.tokens(batch[0])  # (B, T, C)
        for block, change in zip(self.blocks, [*self.changes, nn.Identity()], strict=True):
            x = change(block(x))
        return next_token_loss(self.head(x), batch[1])

    @override
    def draw(self, num_samples: int) -> Batch:
        tokens = torch.randint(self.vocabulary_size, (num_samples, self.length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Growing128To512(Growing):
    """Ten million parameters, each width twice the one before, as those of a Swin transformer are."""

    widths = (128, 128, 128, 128, 256, 256, 256, 256, 512, 512)


SHAPES: Mapping[str, type[Family]] = {
    "6 x 512": GPT6x512,
    "12 x 256": GPT12x256,
    "24 x 128": GPT24x128,
    "3 x 1024": GPT3x1024,
    "2 x 768": GPT2x768,
    "256 to 768": Growing,
    "128 to 512": Growing128To512,
    "tiny": TinyGPT,
}
"""By layers x width, or by widths."""
