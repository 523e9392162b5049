"""Blocks as transformers have them, whose matrix products an emulated device has computed after stated seconds."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from typing_extensions import override

from benchmarks.families.base import Batch, Family
from benchmarks.testbed.emulated.device import Device


class _Work(Function):
    """Operation that saves its operands and makes zeros: values are not what is measured."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, num_features: int, device: Device, seconds: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.device, ctx.seconds = device, seconds
        return _computed(x.new_zeros(*x.shape[:-1], num_features), device, seconds)

    @staticmethod
    @override
    def backward(ctx: Any, *_: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight = None if weight is None else torch.zeros_like(weight)
        return _computed(torch.zeros_like(x), ctx.device, 2 * ctx.seconds), of_weight, None, None, None


def _computed(result: Tensor, device: Device, seconds: float) -> Tensor:
    if not isinstance(result, FakeTensor):
        device.compute(seconds)
    return result


class Product(nn.Module):
    """Linear without bias, of which a row takes stated seconds."""

    def __init__(self, num_inputs: int, num_outputs: int, device: Device, flops_per_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_outputs, num_inputs) / math.sqrt(num_inputs))
        self.device, self.row_s = device, 2 * num_inputs * num_outputs / flops_per_s

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.device.computes:
            return F.linear(x, self.weight)
        seconds = self.row_s * x.shape[:-1].numel()
        found: Tensor = _Work.apply(x.to(self.weight.dtype), self.weight, len(self.weight), self.device, seconds)  # type: ignore[no-untyped-call]
        return found


class Block(nn.Module):
    """Four products, with what attention and an activation save between them: (B, T, C) -> (B, T, C)."""

    def __init__(self, width: int, device: Device, flops_per_s: float) -> None:
        super().__init__()
        self.qkv = Product(width, 3 * width, device, flops_per_s)
        self.proj = Product(width, width, device, flops_per_s)
        self.expand = Product(width, 4 * width, device, flops_per_s)
        self.shrink = Product(4 * width, width, device, flops_per_s)
        self.device, self.width = device, width

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self._between(self.qkv(x), self.width))
        output: Tensor = x + self.shrink(self._between(self.expand(x), 4 * self.width))
        return output

    def _between(self, x: Tensor, num_features: int) -> Tensor:
        if self.device.computes:
            return F.gelu(x)[..., :num_features].contiguous()
        found: Tensor = _Work.apply(x, None, num_features, self.device, 0.0)  # type: ignore[no-untyped-call]
        return found


class Blocks(Family):
    """A chain of blocks between two products.

    Args:
        num_layers: blocks.
        width: C.
        num_rows: T, of one sample.
        device: that computes.
        flops_per_s: of the device, on one row.
        is_fused: whether AdamW is torch's fused one, or its default, which on CPU is a loop over parameters.
    """

    def __init__(
        self, num_layers: int, width: int, num_rows: int, device: Device, flops_per_s: float, *, is_fused: bool = True
    ) -> None:
        super().__init__()
        self.first = Product(width, width, device, flops_per_s)
        self.blocks = nn.ModuleList(Block(width, device, flops_per_s) for _ in range(num_layers))
        self.last = Product(width, width, device, flops_per_s)
        self.width, self.num_rows, self.is_fused = width, num_rows, is_fused

    @override
    def loss(self, batch: Batch) -> Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        mean: Tensor = self.last(x).float().mean()
        return mean

    @override
    def draw(self, num_samples: int) -> Batch:
        return torch.randn(num_samples, self.num_rows, self.width), torch.zeros(num_samples)

    @override
    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), fused=True if self.is_fused else None)
