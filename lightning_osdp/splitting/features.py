"""Views of a tensor's features, one for each slice, whose gradients meet in one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override


def cut_features(x: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Views ``x[..., start : start + size]``, each made when it is asked for.

    In backward they fill one gradient of x. With ``narrow`` each would make one as large as x, zeros around its own
    features; with ``split`` all of them would be alive until they are put together.

    Args:
        x: of any leading dimensions.
        sizes: of the views, together as many as x has features. All of them must be used.

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
