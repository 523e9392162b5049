"""A decoder-only transformer of any widths, as large as a plan for a machine elsewhere needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.families.base import Batch, Family
from benchmarks.families.text import next_token_loss
from examples.mingpt.model import Block, GPTConfig


class Stages(Family):
    """minGPT's blocks in a row, with a projection wherever the width changes.

    Args:
        widths: of each block; every one a multiple of `num_heads`.
        vocabulary_size: V.
        sequence_length: T, tokens of a sample.
        num_heads: of each block.
    """

    def __init__(
        self, widths: Sequence[int], *, vocabulary_size: int, sequence_length: int, num_heads: int = 16
    ) -> None:
        super().__init__()
        self.vocabulary_size, self.sequence_length = vocabulary_size, sequence_length
        self.tokens = nn.Embedding(vocabulary_size, widths[0])
        self.blocks = nn.Sequential(*_blocks(widths, num_heads))
        self.head = nn.Linear(widths[-1], vocabulary_size)

    @override
    def loss(self, batch: Batch) -> Tensor:
        return next_token_loss(self.head(self.blocks(self.tokens(batch[0]))), batch[1])

    @override
    def draw(self, num_samples: int) -> Batch:
        tokens = torch.randint(self.vocabulary_size, (num_samples, self.sequence_length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _blocks(widths: Sequence[int], num_heads: int) -> Iterator[nn.Module]:
    for width, following in pairwise([*widths, widths[-1]]):
        yield Block(GPTConfig(num_heads=num_heads, hidden_size=width))
        if following != width:
            yield nn.Linear(width, following)
