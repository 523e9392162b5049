"""The loss in what ``training_step`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_osdp.errors import ProfileError


def loss_in(returned: Any) -> Tensor:
    """The loss among what a training step returns."""
    loss: Tensor = returned["loss"] if isinstance(returned, Mapping) else returned
    return loss


def check_loss(returned: Any) -> None:
    """Returns if there is a loss that can be trained on; its value is not looked at.

    Raises:
        ProfileError: there is none.
    """
    advice = "Return the loss, a scalar tensor, or a dict with it under 'loss', from training_step."
    if isinstance(returned, Mapping) and "loss" not in returned:
        raise ProfileError(f"Expected training_step to return a dict with 'loss', got the keys {[*returned]}. {advice}")
    loss = loss_in(returned)
    if not isinstance(loss, Tensor):
        raise ProfileError(f"Expected training_step to return a loss on the profiling batch, got {loss!r}. {advice}")
    if not loss.requires_grad or loss.numel() != 1:
        raise ProfileError(
            f"Expected the loss to be a scalar that depends on trainable parameters, got shape {list(loss.shape)},"
            f" requires_grad={loss.requires_grad}. {advice}"
        )


def check_finite(loss: Tensor) -> None:
    """Returns if the loss is a number.

    Raises:
        ProfileError: it is infinite or not a number.
    """
    if not torch.isfinite(loss).all():
        raise ProfileError(
            f"Expected a finite loss on the profiling batch, got {loss.item()!r}."
            " Look for NaN in the first training batch, or for a loss that overflows in this precision."
        )
