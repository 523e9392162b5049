"""A model without values for a while: what is too large for its device is profiled by its shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def without_values(module: nn.Module) -> Iterator[None]:
    """Within it, parameters and buffers are on the meta device, each where it is registered; then they are back.

    Names, ties, dtypes, what is frozen and what is set on parameters stay as they are.
    """
    stand_ins: dict[Tensor, Tensor] = {}
    kept: list[tuple[dict[str, Any], str, Tensor]] = [
        (registered, name, tensor)
        for child in module.modules()
        for registered in (child._parameters, child._buffers)
        for name, tensor in registered.items()
        if tensor is not None and not tensor.is_meta
    ]
    for registered, name, tensor in kept:
        if tensor not in stand_ins:
            stand_ins[tensor] = stand_in(tensor)
        registered[name] = stand_ins[tensor]
    try:
        yield
    finally:
        for registered, name, tensor in kept:
            registered[name] = tensor


def stand_in(tensor: Tensor) -> Tensor:
    """A tensor on the meta device in place of another: a parameter for one, with what is set on it."""
    found = torch.empty_like(tensor, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return found
    parameter = nn.Parameter(found, requires_grad=tensor.requires_grad)
    vars(parameter).update(vars(tensor))
    return parameter
