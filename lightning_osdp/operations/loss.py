"""Cross entropy of logits that are never all alive."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_osdp.errors import ConfigurationError

_INDICES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def chunked_cross_entropy(
    head: nn.Module,
    hidden: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int = 1024,
) -> Tensor:
    """Cross entropy of ``head(hidden)``, with the logits of a slice of the tokens alive at a time.

    It is ``F.cross_entropy(head(hidden).flatten(0, -2), target.flatten())`` but for rounding, and so are its gradients.
    Logits and their gradient take ``chunk_size`` rows in place of all; backward computes each slice again, which takes
    a forward of the head. The head is called once, so that it may be a unit of a plan, whole or in slices, and its
    hooks run once, on ``hidden`` and ``target``, and on the loss.

    Args:
        head: the last layer, which treats each token by itself, such as ``nn.Linear(width, num_classes)``.
        hidden: what it takes, of shape ``(..., width)``.
        target: class of each token, whole numbers of shape ``(...)``.
        ignore_index: class of tokens that do not count.
        label_smoothing: as of ``F.cross_entropy``, in [0, 1].
        chunk_size: tokens of a slice.

    Returns:
        Mean over all tokens that count, in float32, or float64 where the logits are; NaN where none counts.

    Raises:
        ConfigurationError: targets are not one whole number for each token, or ``chunk_size`` is not positive.

    Example:
        >>> head, hidden, target = nn.Linear(4, 10), torch.randn(2, 3, 4), torch.tensor([[1, 2, 3], [4, 5, -100]])
        >>> loss = chunked_cross_entropy(head, hidden, target, chunk_size=2)
        >>> bool(torch.isclose(loss, F.cross_entropy(head(hidden).flatten(0, 1), target.flatten())))
        True
    """
    if target.shape != hidden.shape[:-1] or target.dtype not in _INDICES:
        raise ConfigurationError(
            f"Expected a target that has one class, a whole number, for each token of hidden, which has shape"
            f" {tuple(hidden.shape)}, got shape {tuple(target.shape)} of {target.dtype}. Use F.cross_entropy for"
            " probabilities of classes."
        )
    if chunk_size < 1:
        raise ConfigurationError(f"Expected chunk_size to be a positive number of tokens, got {chunk_size!r}.")
    forward = head.forward

    def summed(hidden: Tensor, target: Tensor) -> Tensor:
        logits: Tensor = forward(hidden)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()  # sums of many tokens
        return F.cross_entropy(
            logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
        )

    def mean(hidden: Tensor, target: Tensor) -> Tensor:
        tokens, classes = hidden.flatten(0, -2), target.flatten().long()
        slices = zip(tokens.split(chunk_size), classes.split(chunk_size), strict=True)
        parts: list[Any] = [checkpoint(summed, *each, use_reentrant=False) for each in slices]
        return torch.stack(parts).sum() / (classes != ignore_index).sum()

    with patch.object(head, "forward", mean):
        loss: Tensor = head(hidden, target)
    return loss
