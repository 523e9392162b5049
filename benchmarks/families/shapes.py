"""Transformers of different shapes, for links that are slow and cores that are few: what the benchmarks time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.families.base import Batch, Family
from benchmarks.families.dense import TwoLayers
from benchmarks.families.text import LlamaLayer, LlamaLike, MinGPT, next_token_loss
from benchmarks.families.vision import VGG, VGG16, WideHead, WideViT
from examples.mingpt.model import Block, GPTConfig


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


class ManyRows(Growing):
    """Two small blocks behind an embedding of many rows, which has nearly all parameters."""

    widths, num_rows = (64, 64), 200_000

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(self.num_rows, self.widths[0])

    @override
    def draw(self, num_samples: int) -> Batch:
        rows = torch.randint(self.num_rows, (num_samples, self.length + 1))
        return rows[:, :-1].contiguous(), rows[:, 1:] % self.vocabulary_size


class MillionRows(ManyRows):
    """Likewise, with five times the rows."""

    num_rows = 1_000_000


class Adapted(nn.Module):
    """A frozen Linear with a trained detour of rank 8 beside it, as LoRA has it; what it adds is 0 at first."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    @override
    def forward(self, x: Tensor) -> Tensor:
        sum_: Tensor = self.frozen(x) + self.up(self.down(x))
        return sum_


def _adapt(model: nn.Module, kind: type[nn.Module]) -> None:
    """Has adapters of all Linears in blocks of this kind trained, and nothing else."""
    model.requires_grad_(False)
    linears = [
        (parent, name, child)
        for block in model.modules()
        if isinstance(block, kind)
        for parent in block.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    for parent, name, child in linears:
        setattr(parent, name, Adapted(child))


class Lora(MinGPT):
    """A GPT of which adapters are trained."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        _adapt(self, Block)


class Llama12x256(LlamaLike):
    """A decoder as Llama's are, as large as the GPT of 12 layers."""

    vocabulary_size, length, num_layers, hidden_size, mlp_size = 256, 128, 12, 256, 688


class TinyLlama(LlamaLike):
    """In small."""

    vocabulary_size, length, num_layers, hidden_size, mlp_size, num_heads, num_groups = 32, 16, 3, 32, 88, 4, 2


class LlamaLora(LlamaLike):
    """A decoder as Llama's are of which adapters are trained: as large as the GPT of 6 layers."""

    vocabulary_size, length, num_layers, hidden_size, mlp_size = 256, 32, 6, 512, 1376

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        _adapt(self, LlamaLayer)


class TinyLlamaLora(LlamaLora):
    """In small."""

    vocabulary_size, length, num_layers, hidden_size, mlp_size, num_heads, num_groups = 32, 16, 3, 32, 88, 4, 2


def _gpt(
    num_layers: int,
    hidden_size: int,
    *,
    num_heads: int,
    vocabulary_size: int = 256,
    sequence_length: int = 128,
    kind: type[MinGPT] = MinGPT,
) -> type[Family]:
    class Shaped(kind):  # type: ignore[misc, valid-type]
        config = GPTConfig(vocabulary_size, sequence_length, num_layers, num_heads, hidden_size)

    return Shaped


def _llama(num_layers: int, hidden_size: int, mlp_size: int, *, length: int, num_groups: int = 2) -> type[Family]:
    return type(
        "Shaped",
        (LlamaLike,),
        {
            "vocabulary_size": 256,
            "length": length,
            "num_layers": num_layers,
            "hidden_size": hidden_size,
            "mlp_size": mlp_size,
            "num_groups": num_groups,
        },
    )


SHAPES: Mapping[str, Callable[[str], Family]] = {
    "6 x 512": _gpt(6, 512, num_heads=8),
    "8 x 64": _gpt(8, 64, num_heads=4),
    "12 x 256": _gpt(12, 256, num_heads=4),
    "24 x 128": _gpt(24, 128, num_heads=4),  # the paper's narrow and deep one in 1/256 of its parameters: 96 x 1024
    "12 x 256 like Llama": Llama12x256,
    "3 x 1024": _gpt(3, 1024, num_heads=8),
    "2 x 768": _gpt(2, 768, num_heads=8),  # the paper's wide and shallow one in 1/256 of its parameters: 2 x 12288
    **{
        f"2 x 768, {length} tokens": _gpt(2, 768, num_heads=8, sequence_length=length)
        for length in (32, 256, 512, 1024)
    },
    **{f"2 x 768 like Llama, {length} tokens": _llama(2, 768, 2048, length=length) for length in (32, 128)},
    **{
        f"2 x 768 like Llama 2, {length} tokens": _llama(2, 768, 2048, length=length, num_groups=8)
        for length in (32, 128)  # with keys and values for each head, as in its model of 7 billion parameters
    },
    "2 x 768 of a ViT, 64 tokens": WideViT,
    "3 wide Linears": WideHead,
    "VGG-11": VGG,
    "VGG-16": VGG16,
    "200,000 rows": ManyRows,
    "1,000,000 rows": MillionRows,
    "256 to 768": Growing,
    "128 to 512": Growing128To512,
    "6 x 512, LoRA": _gpt(6, 512, num_heads=8, sequence_length=32, kind=Lora),
    "6 x 512 like Llama, LoRA": LlamaLora,
    "12 x 256, LoRA": _gpt(12, 256, num_heads=4, sequence_length=32, kind=Lora),
    **{f"2 Linears of {size}": partial(TwoLayers, size) for size in (1024, 2048, 4096, 8192, 12288)},
    "tiny": _gpt(3, 32, num_heads=2, vocabulary_size=32, sequence_length=16),
    "tiny like Llama": TinyLlama,
    "tiny like Llama, LoRA": TinyLlamaLora,
    "tiny, LoRA": _gpt(3, 32, num_heads=2, vocabulary_size=32, sequence_length=16, kind=Lora),
}
"""Models by layers x width, or by widths; the transformers have 10 to 38 million parameters, but for the smallest."""
