"""Models that `configure_model` creates on the meta device: given real storage, and the same values on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.errors import ProfileError


def materialize(module: nn.Module, device: torch.device) -> None:
    """Gives meta parameters and buffers storage, initialises them, and copies rank 0's values to all ranks.

    Ties stay ties. Modules without meta tensors keep what they have. Call it on all ranks.

    Args:
        module: the unwrapped model; the whole of it must fit on the device.
        device: where the storage is.

    Raises:
        ProfileError: a module that owns meta tensors has no ``reset_parameters`` to initialise them with.
    """
    owners = [(name, child) for name, child in module.named_modules() if any(t.is_meta for _, t in _own(child))]
    for name, child in owners:
        if not callable(getattr(child, "reset_parameters", None)):
            raise ProfileError(
                f"Expected every module on the meta device to have reset_parameters(), which initialises it, but"
                f" {name or 'the model itself'} ({type(child).__name__}) has none. Write one, or create the module on a"
                " real device in configure_model."
            )
    real: dict[Tensor, Tensor] = {}
    for _, child in owners:
        for name, tensor in _own(child):
            if tensor.is_meta:
                storage = torch.empty_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                real.setdefault(tensor, nn.Parameter(storage, tensor.requires_grad) if is_parameter else storage)
                (child._parameters if is_parameter else child._buffers)[name] = real[tensor]
    with torch.no_grad():
        for _, child in owners:
            child.reset_parameters()
        if dist.is_initialized() and dist.get_world_size() > 1:
            for tensor in real.values():
                dist.broadcast(tensor, src=0)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the module itself, by name."""
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
