"""Dtypes in which ``fully_shard`` has a model compute under mixed precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_osdp.errors import ConfigurationError


@dataclass(frozen=True)
class ComputePrecision:
    """Dtypes of parameters, inputs and gradients, as a ``MixedPrecision`` of ``torch.distributed.fsdp`` has them.

    Buffers keep their dtype: ``fully_shard`` leaves them alone.

    Raises:
        ConfigurationError: something is no dtype.
    """

    dtype: torch.dtype | None = None
    """Dtype of gathered parameters and of floating-point inputs; None: as they are."""
    exempt: tuple[type[nn.Module], ...] = ()
    """Classes of modules that compute in float32, each a unit of its own: ``_module_classes_to_ignore``."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of gradients while they are reduced; None: as they are computed."""

    def __post_init__(self) -> None:
        for name in ("dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, torch.dtype):
                raise ConfigurationError(
                    f"Expected {name} of ComputePrecision to be None or a dtype such as torch.bfloat16, got {value!r}."
                )

    def is_exempt(self, module: nn.Module) -> bool:
        """Tells if a module computes in float32 while the model computes in `dtype`."""
        return self.dtype is not None and isinstance(module, self.exempt)

    def cast(self, batch: Any) -> Any:
        """Batch with floating-point tensors cast as the root unit casts them."""
        dtype = self.dtype
        return batch if dtype is None else tree_map_only(Tensor, lambda tensor: _cast(tensor, dtype), batch)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Casts the model's parameters while it is active, so that autocast makes no copies that training lacks."""
        whole: dict[nn.Parameter, Tensor] = {}
        with ExitStack() as cleanup:
            for child in module.modules() if self.dtype is not None else ():
                if self.is_exempt(child):
                    cleanup.enter_context(_in_float32(child))
                else:
                    whole.update((parameter, parameter.data) for parameter in child.parameters(recurse=False))
            for parameter, data in whole.items():
                cleanup.callback(setattr, parameter, "data", data)
                parameter.data = self.cast(data)
            yield


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@contextmanager
def _in_float32(module: nn.Module) -> Iterator[None]:
    """Casts floating-point inputs to float32, and outputs back to the dtype of the last input."""
    before: list[torch.dtype] = []

    def enter(_: nn.Module, args: Any) -> Any:
        before[:] = [tensor.dtype for tensor in args if isinstance(tensor, Tensor) and tensor.is_floating_point()]
        return tree_map_only(Tensor, lambda tensor: _cast(tensor, torch.float32), args)

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: _cast(tensor, before[-1]), output) if before else output

    with module.register_forward_pre_hook(enter), module.register_forward_hook(leave):
        yield
