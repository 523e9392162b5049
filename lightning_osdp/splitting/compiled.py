"""Modules that torch compiles whole: nothing inside them can be a unit, or in slices that are."""

from __future__ import annotations

from inspect import getclosurevars

from torch import nn
from torch._dynamo import OptimizedModule


def compiled_whole(module: nn.Module) -> list[str]:
    """Names of the modules in a model that are compiled with ``fullgraph=True``, wrapped or in place.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net[0].compile(fullgraph=True)
        >>> compiled_whole(net)
        ['0']
    """
    return [name for name, child in module.named_modules() if _is_whole(child)]


def _is_whole(module: nn.Module) -> bool:
    if isinstance(module, OptimizedModule):
        return bool(module.dynamo_ctx.fullgraph)
    call = module._compiled_call_impl
    # what compiles it is known to that function alone; elsewhere than in torch 2.13, perhaps not even to it
    return call is not None and getattr(getclosurevars(call).nonlocals.get("self"), "fullgraph", False)
