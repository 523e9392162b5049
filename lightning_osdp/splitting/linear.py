"""`nn.Linear` in slices along its input features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_osdp.splitting.module import SplitModule


class SplitLinear(SplitModule):
    """y = x_1 W_1^T + x_2 W_2^T + ... + b: OSDP's operator splitting, added up in one output."""

    cuts_along: ClassVar = {"weight": 1}
    features = "in_features"

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Output of the whole operator.

        Args:
            x: (*, in_features), any float dtype; autocast holds for the slices as it does for a Linear.

        Returns:
            (*, out_features).
        """
        total: Tensor | None = None
        # torch fuses the bias into the product of a matrix, and not into that of a view with more dimensions.
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        for part, features in zip(self.slices, _cut_features(rows, self.sizes), strict=True):
            # In place: products save their inputs for backward, not their results. No name holds on to a partial one.
            total = part(features) if total is None else total.add_(part(features))
        assert total is not None
        if rows is x:
            return total
        # As F.linear does: to autograd no view, which would lose fully_shard's hooks where it is changed in place.
        output: Tensor = torch.ops.aten._unsafe_view(total, [*x.shape[:-1], total.shape[-1]])
        return output


def _cut_features(x: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Views ``x[..., start : start + size]``, each made when it is asked for.

    In backward they fill one gradient of x. With ``narrow`` each would make one as large as x, zeros around its own
    features; with ``split`` all of them would be alive until they are put together. All of the views must be used.

    Raises:
        RuntimeError: x has another number of features.
    """
    if x.shape[-1:] != (sum(sizes),):
        raise RuntimeError(f"Expected an input with {sum(sizes)} features, got one of shape {tuple(x.shape)}.")
    joint = _JointGradient(len(sizes))
    start = 0
    for size in sizes:
        if x.requires_grad and torch.is_grad_enabled():
            yield _View.apply(x, start, size, joint)  # type: ignore[no-untyped-call]
        else:
            yield x.narrow(-1, start, size)
        start += size


class _JointGradient:
    """The gradient of all features while slices fill it."""

    def __init__(self, num_slices: int) -> None:
        self._num_slices = num_slices
        self._num_missing = 0
        self._whole: Tensor | None = None

    def fill(self, shape: torch.Size, start: int, gradient: Tensor) -> Tensor | None:
        """Notes the gradient of the features from ``start`` on; returns that of all with the last of them."""
        if self._whole is None:
            self._whole, self._num_missing = gradient.new_empty(shape), self._num_slices
        self._whole.narrow(-1, start, gradient.shape[-1]).copy_(gradient)
        self._num_missing -= 1
        if self._num_missing:
            return None
        whole, self._whole = self._whole, None
        return whole


class _View(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, start: int, size: int, joint: _JointGradient) -> Tensor:
        ctx.shape, ctx.start, ctx.joint = x.shape, start, joint
        return x.narrow(-1, start, size)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        return ctx.joint.fill(ctx.shape, ctx.start, gradient), None, None, None
