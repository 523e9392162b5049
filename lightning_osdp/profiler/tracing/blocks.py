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
from lightning_osdp.profiler.step.snapshot import storage_key
from lightning_osdp.profiler.tracing.calls import Calls, Position

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(module: nn.Module, calls: Calls, given: Collection[nn.Module] | None = None) -> dict[str, Span]:
    """Modules that may be blocks, with the segments that they run, in this order.

    Each is called once. Of those inside others, the outermost. If none are given, those that stand in one container
    with others of their class and are made of several operators, or keeping nothing of them would save nothing.
    """
    repeated = _repeated(module) if given is None else frozenset()
    found: dict[str, Span] = {}
    for name, child in module.named_modules():
        spans = calls.spans.get(name, [])
        if len(spans) != 1 or any(name.startswith(f"{outer}.") for outer in found):
            continue
        first, last = spans[0]
        within = calls.sequence[first : last + 1]
        is_made_of_several = len(within) > 1 and all(each.startswith(f"{name}.") for each in within)
        if child in given if given is not None else name in repeated and is_made_of_several:
            found[name] = first, last
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _repeated(module: nn.Module) -> frozenset[str]:
    """Names of modules that stand in one container with others of their class."""
    found = set()
    for name, container in module.named_modules():
        if isinstance(container, _CONTAINERS):
            kinds = Counter(type(child) for child in container.children())
            alike = (key for key, child in container.named_children() if kinds[type(child)] > 1)
            found |= {f"{name}.{key}" if name else key for key in alike}
    return frozenset(found)


@contextmanager
def saving_less(
    module: nn.Module, blocks: Mapping[str, Span], choice: str, position: Position, kept: Collection[int | None]
) -> Iterator[set[int]]:
    """Has blocks recompute or offload what they save, for as long as the step is only followed, not computed.

    To ``offload``, tensors must be fake: what is moved away comes back as another tensor of the same shape. Storages
    that are ``kept`` are not moved.

    Yields:
        The last segments of blocks that have been run again early, before backward has reached what they returned.
    """
    early: set[int] = set()
    with ExitStack() as cleanup:
        for name, span in blocks.items() if choice != "keep" else ():
            block = module.get_submodule(name)
            if choice == "recompute":
                less = _recomputing(block.forward, span, position, early)
            else:
                less = _offloading(block.forward, span, position, kept)
            cleanup.enter_context(patch.object(block, "forward", less))
        yield early


def _recomputing(forward: Callable[..., Any], span: Span, position: Position, early: set[int]) -> Callable[..., Any]:
    first, last = span

    def begin(*args: Any, **kwargs: Any) -> Any:
        position.enter(first)
        num_args, names = len(args), tuple(kwargs)  # and not the inputs themselves, which would live on

        def run(*given: Any) -> Any:
            if position.in_backward and position.now != last:
                early.add(last)
            return forward(*given[:num_args], **dict(zip(names, given[num_args:], strict=True)))

        # by position: it does not save what it gets by name
        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)

    return begin


def _offloading(
    forward: Callable[..., Any], span: Span, position: Position, kept: Collection[int | None]
) -> Callable[..., Any]:
    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        if tensor.layout is not torch.strided or storage_key(tensor) in kept:
            return lambda: tensor
        return partial(torch.empty_strided, tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def begin(*args: Any, **kwargs: Any) -> Any:
        position.enter(span[0])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda make: make()):
            return forward(*args, **kwargs)

    return begin
