"""Blocks: repeated modules that need not keep what they save for backward, and what a step is like if they do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.core.profile import Span
from lightning_osdp.profiler.calls import Calls
from lightning_osdp.profiler.segments import Position

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(module: nn.Module, calls: Calls) -> dict[str, Span]:
    """Modules that stand in one container with others of their class, with the segments that they run, in this order.

    Each is called once, and is made of several modules, or keeping nothing of it would save nothing. Of those inside
    others, the outermost.

    Args:
        module: the model.
        calls: what its forward does.
    """
    found: dict[str, Span] = {}
    for prefix, container in module.named_modules():
        if not isinstance(container, _CONTAINERS) or any(f"{prefix}.".startswith(f"{name}.") for name in found):
            continue
        kinds = Counter(type(child) for child in container.children())
        for key, child in container.named_children():
            name = f"{prefix}.{key}" if prefix else key
            spans = calls.spans.get(name, [])
            if kinds[type(child)] > 1 and len(spans) == 1 and _runs(calls, name, spans[0]):
                found[name] = spans[0]
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _runs(calls: Calls, name: str, span: Span) -> bool:
    """Whether this module runs these segments, several, from the first operator's call on."""
    first, last = span
    return last > first and all(each.startswith(f"{name}.") for each in calls.sequence[first : last + 1])


@contextmanager
def saving_less(
    module: nn.Module, blocks: Mapping[str, Span], choice: str, position: Position, static: Collection[int]
) -> Iterator[None]:
    """Has blocks recompute or offload what they save, for as long as the step is only followed, not computed.

    Args:
        module: the model.
        blocks: by name, with their segments.
        choice: ``recompute``, or ``offload``, for which tensors must be fake: what has been moved away comes back as
            another tensor of the same shape.
        position: told when a block begins, with its inputs.
        static: storages that live throughout, which are not moved.
    """
    save = _recomputed if choice == "recompute" else partial(_offloaded, static)
    with ExitStack() as cleanup:
        for name, (first, _) in blocks.items():
            block = module.get_submodule(name)
            forward = partial(_entered, position, first, partial(save, block.forward))
            cleanup.enter_context(patch.object(block, "forward", forward))
        yield


def _entered(position: Position, segment: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    position.enter(segment)
    return forward(*args, **kwargs)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _offloaded(static: Collection[int], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        if tensor.layout is not torch.strided or tensor.untyped_storage()._cdata in static:
            return lambda: tensor
        return partial(torch.empty_strided, tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda make: make()):
        return forward(*args, **kwargs)
