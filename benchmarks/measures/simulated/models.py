"""Language models as those were whose numbers are published, for the meta device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.families.shapes import Adapted

aten = torch.ops.aten

_ADAPTED = ("wq", "wv", "wo", "w1", "w2", "w3")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a decoder-only transformer."""

    kind: str
    """Kind of model: ``llama`` of torchtitan, ``litgpt`` of LitGPT, whose blocks are Llama's too, ``mpt`` of
    llm-foundry, or ``demo`` of Lightning's documentation."""
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as `heads`."""
    is_tied: bool = False
    """True if the head is the embedding, as it always is of ``mpt``."""
    lora_rank: int | None = None
    """Rank of the adapters that alone are trained, of all Linears in blocks but ``wk``; None: all is trained."""
    num_chunks: int = 1
    """Parts of a sequence that the loss takes one after the other."""
    is_bfloat16: bool = False
    """True if parameters are in bfloat16, and not in float32."""
    loss: str = "float32"
    """Cross entropy of the logits in ``float32``, in their ``own`` dtype, or ``compiled``, see `CompiledLoss`."""


class LanguageModel(nn.Module):
    """Blocks between an embedding and a head; forward takes (tokens, labels) and returns the loss.

    Args:
        sizes: of the model.
        sequence: tokens of a sample.
        by_operation: whether blocks are checkpointed as torchtitan does ``selective`` by operation.
    """

    def __init__(self, sizes: Sizes, *, sequence: int, by_operation: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        block = _BLOCKS[sizes.kind]
        self.layers = nn.ModuleList(block(sizes, sequence) for _ in range(sizes.layers))
        self.norm = _norm(sizes)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.is_tied or sizes.kind == "mpt":
            self.head.weight = self.embedding.weight
        self._by_operation, self._num_chunks, self._loss = by_operation, sizes.num_chunks, sizes.loss
        if sizes.lora_rank is not None:
            self.requires_grad_(False)
            for layer in self.layers:
                for name in _ADAPTED:
                    setattr(layer, name, Adapted(getattr(layer, name), sizes.lora_rank))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean loss, in float32."""
        tokens, labels = batch
        hidden = self.embedding(tokens)
        for layer in self.layers:
            if self._by_operation:
                hidden = checkpoint(layer, hidden, use_reentrant=False, context_fn=selective)
            else:
                hidden = layer(hidden)
        hidden = self.norm(hidden)
        sums = [
            self._sum(self.head(some).flatten(0, 1), targets.flatten())
            for some, targets in zip(hidden.chunk(self._num_chunks, 1), labels.chunk(self._num_chunks, 1), strict=True)
        ]
        return torch.stack(sums).sum() / labels.numel()

    def _sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy, summed over tokens."""
        if self._loss == "compiled":
            found: Tensor = CompiledLoss.apply(logits, labels)  # type: ignore[no-untyped-call]
            return found
        return F.cross_entropy(logits.float() if self._loss == "float32" else logits, labels, reduction="sum")


class CompiledLoss(torch.autograd.Function):
    """Cross entropy that keeps what a compiled one keeps: logits in their own dtype, and a number for each token.

    Eager cross entropy in float32 keeps a log-softmax, which is twice as large as logits in bfloat16.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum over tokens; logits are (tokens, vocabulary), labels (tokens)."""
        total = logits.logsumexp(-1, keepdim=True)
        context.save_for_backward(logits, labels, total)
        return (total - logits.gather(-1, labels[:, None])).sum()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Softmax less one at each label, in one tensor as large as the logits."""
        logits, labels, total = context.saved_tensors
        found = (logits - total).exp_()
        found.scatter_add_(-1, labels[:, None], torch.full_like(total, -1))
        return found.mul_(gradient), None


class DemoModel(nn.Module):
    """Lightning's demo Transformer, an encoder and a decoder; forward takes (tokens, labels) and returns the loss."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.model = Transformer(
            vocab_size=sizes.vocabulary,
            nlayers=sizes.layers,
            ninp=sizes.hidden,
            nhead=sizes.heads,
            nhid=sizes.ffn,
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean loss, as the documentation's example has it."""
        tokens, labels = batch
        return F.nll_loss(self.model(tokens, labels), labels.flatten())


def made(sizes: Sizes, *, sequence: int, by_operation: bool = False) -> nn.Module:
    """The model of these sizes."""
    if sizes.kind == "demo":
        return DemoModel(sizes)
    return LanguageModel(sizes, sequence=sequence, by_operation=by_operation)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, fewer key heads than query heads, SwiGLU; nothing has a bias."""

    def __init__(self, sizes: Sizes, sequence: int) -> None:
        super().__init__()
        self._heads, self._kv_heads = sizes.heads, sizes.kv_heads or sizes.heads
        width = sizes.hidden // sizes.heads
        linear = partial(nn.Linear, bias=False)
        self.attention_norm, self.ffn_norm = _norm(sizes), _norm(sizes)
        self.wq = linear(sizes.hidden, sizes.hidden)
        self.wk = linear(sizes.hidden, self._kv_heads * width)
        self.wv = linear(sizes.hidden, self._kv_heads * width)
        self.wo = linear(sizes.hidden, sizes.hidden)
        self.w1, self.w3 = linear(sizes.hidden, sizes.ffn), linear(sizes.hidden, sizes.ffn)
        self.w2 = linear(sizes.ffn, sizes.hidden)
        self._angles = (sequence, width // 2)

    def forward(self, x: Tensor) -> Tensor:
        """As large as its input."""
        q, k, v = self._attended(self.attention_norm(x))
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        mixed: Tensor = self.w2(F.silu(self.w1(normed)) * self.w3(normed))
        return x + mixed

    def _attended(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (samples, tokens, heads, width)."""
        q, k, v = (
            projection(normed).unflatten(-1, (heads, -1))
            for projection, heads in ((self.wq, self._heads), (self.wk, self._kv_heads), (self.wv, self._kv_heads))
        )
        q, k = self._rotated(q), self._rotated(k)
        k, v = (_repeated(each, self._heads // self._kv_heads) for each in (k, v))
        return q, k, v

    def _rotated(self, x: Tensor) -> Tensor:
        turns = torch.ones(self._angles, dtype=torch.complex64, device=x.device)[None, :, None, :]
        turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turns
        return torch.view_as_real(turned).flatten(3).type_as(x)


class LitGPTBlock(LlamaBlock):
    """Llama's block with one projection for queries, keys and values, and positions in the dtype of its input."""

    def __init__(self, sizes: Sizes, sequence: int) -> None:
        super().__init__(sizes, sequence)
        del self.wq, self.wk, self.wv
        width = sizes.hidden // sizes.heads
        self.wqkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * self._kv_heads) * width, bias=False)

    def _attended(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.wqkv(normed).unflatten(-1, (self._heads + 2 * self._kv_heads, -1))
        q, k, v = qkv.split((self._heads, self._kv_heads, self._kv_heads), 2)
        k, v = (_repeated(each, self._heads // self._kv_heads) for each in (k, v))
        return self._rotated(q), self._rotated(k), v

    def _rotated(self, x: Tensor) -> Tensor:
        tokens, half = self._angles
        turns = torch.ones(tokens, 1, 2 * half, dtype=x.dtype, device=x.device)
        first, second = x.split(half, -1)
        return x * turns + torch.cat((-second, first), -1) * turns


class MptBlock(nn.Module):
    """LayerNorm, one projection for queries, keys and values, GELU; nothing has a bias."""

    def __init__(self, sizes: Sizes, sequence: int) -> None:
        super().__init__()
        del sequence
        self._heads = sizes.heads
        linear = partial(nn.Linear, bias=False)
        self.norm_1, self.norm_2 = _norm(sizes), _norm(sizes)
        self.wqkv, self.out = linear(sizes.hidden, 3 * sizes.hidden), linear(sizes.hidden, sizes.hidden)
        self.up, self.down = linear(sizes.hidden, sizes.ffn), linear(sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """As large as its input."""
        q, k, v = (
            part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in self.wqkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + mixed


class RMSNorm(nn.Module):
    """RMS norm in float32, by operations of their own, as torchtitan has ``rmsnorm``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """As large as its input."""
        whole = x.float()
        normed = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


_BLOCKS: Mapping[str, Callable[[Sizes, int], nn.Module]] = {
    "llama": LlamaBlock,
    "litgpt": LitGPTBlock,
    "mpt": MptBlock,
}
"""Blocks of a kind of model."""


def _norm(sizes: Sizes) -> nn.Module:
    return nn.LayerNorm(sizes.hidden, bias=False) if sizes.kind == "mpt" else RMSNorm(sizes.hidden)


def _repeated(x: Tensor, number: int) -> Tensor:
    if number == 1:
        return x
    return x[:, :, :, None, :].expand(-1, -1, -1, number, -1).flatten(2, 3)


_SAVED = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
}


def selective() -> tuple[Any, Any]:
    """Torchtitan's policy: attention and every other matrix product are saved, all else is recomputed."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        is_product = function == aten.mm.default
        counts[context.is_recompute] += is_product
        saves = function in _SAVED or (is_product and counts[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts
