"""Modules that torch compiles: what is profiled of them is their own code, which compiling leaves as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._dynamo import OptimizedModule

_MAX_NAMED = 3


def compiled_modules(module: nn.Module) -> list[str]:
    """Names of the modules in a model that are compiled, ``torch.compile(net)`` of Lightning's own being the root."""
    return [name for name, child in module.named_modules() if _is_compiled(child)]


def note_of(names: list[str]) -> str:
    """What a plan says of them."""
    named = ", ".join(repr(name) if name else "the whole model" for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (
        f"{named}{more}: profiled as eager code, so that times and memory are not those of compiled code; each unit"
        " inside a compiled module breaks its graph in two places"
    )


@contextmanager
def as_eager(names: list[str]) -> Iterator[None]:
    """Within it, nothing is compiled, and nothing that is runs; for a model with these compiled modules.

    Hooks by which a model is profiled would be compiled, too, or would not run at all.
    """
    if not names:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _is_compiled(module: nn.Module) -> bool:
    is_in_place = getattr(module, "_compiled_call_impl", None) is not None
    is_by_lightning = getattr(module, "_compiler_ctx", None) is not None
    return isinstance(module, OptimizedModule) or is_in_place or is_by_lightning
