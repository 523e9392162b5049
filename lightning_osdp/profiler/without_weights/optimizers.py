"""Optimizers from descriptions: import paths, or bytes of state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler.without_weights.imported import built, imported

_SETTINGS = "Give what it takes as optimizer_settings."
_MOST_BYTES = 64


def optimizers_by_name(optimizer: str, settings: Mapping[str, Any]) -> Callable[[nn.Module], Sequence[Optimizer]]:
    """Function that takes a module and returns an optimizer of all its parameters.

    Args:
        optimizer: import path of the optimizer's class, such as ``torch.optim.SGD`` or ``package.module:Name``; or the
            bytes of state that the optimizer keeps for an element, such as ``2`` for an Adam with 8-bit moments.
        settings: arguments of the class.

    Raises:
        ConfigurationError: there is no such class; or, when it is called, it cannot be built.
    """
    if optimizer.isdecimal():
        if int(optimizer) > _MOST_BYTES or settings:
            raise ConfigurationError(
                f"Expected at most {_MOST_BYTES} bytes of optimizer state an element, and no settings, got {optimizer}"
                f" and {dict(settings)}. Name its class, as in torch.optim.SGD."
            )
        make: Callable[..., Any] = partial(_Stated, num_bytes=int(optimizer))
    else:
        make = imported(optimizer if ":" in optimizer else ":".join(optimizer.rsplit(".", 1)))

    def make_all(module: nn.Module) -> Sequence[Optimizer]:
        made = built(f"optimizer {optimizer!r}", _SETTINGS, make, module.parameters(), **settings)
        if not isinstance(made, Optimizer):
            raise ConfigurationError(
                f"Expected {optimizer!r} to make an Optimizer of torch, got {type(made).__name__}. Name its class."
            )
        return [made]

    return make_all


class _Stated(Optimizer):
    """Optimizer that reads and writes ``num_bytes`` of state an element in one pass, as fused kernels do."""

    def __init__(self, params: Any, *, num_bytes: int) -> None:
        super().__init__(params, {})
        self._num_bytes = num_bytes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates state and parameters without temporaries."""
        del closure
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state = self.state[parameter]
            for index in range(self._num_bytes):
                if index not in state:
                    state[index] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[index].add_(1)
            parameter.add_(parameter.grad)
