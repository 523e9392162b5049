"""Leaves no trace: runs a training step for its cost alone and puts everything back that it changed."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Restore = Callable[[], object]
_KEPT = (dict, list, tuple, set, deque, Tensor, torch.Generator)


@contextmanager
def untouched(module: nn.Module, *, left_out: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restores, on exit, buffers, gradients, training flags, attributes and the random number generators.

    Inside, there are no gradients. Tensors, generators and nested lists, tuples, dicts, sets and deques that a module
    holds (counters, metric states, collected losses) get their contents back; other objects are not looked into.

    Args:
        module: what is run. Its parameters are left alone, but for those that forward itself changes.
        left_out: further tensors that are left alone.
    """
    snapshot = _Snapshot(left_out=(*module.parameters(), *left_out))
    for child in module.modules():
        snapshot.keep(vars(child))
    restores = [snapshot.restore, *(_restore_values(p) for m in module.modules() for p in _renormalized(m))]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices), _other_generators():
            yield
    finally:
        for restore in restores:
            restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


class _Snapshot:
    """Contents of objects, however deep they lie in containers; kept flat, for a model has many."""

    def __init__(self, left_out: Iterable[Tensor]) -> None:
        self._seen = {id(tensor) for tensor in left_out}
        self._containers: list[tuple[Any, Any]] = []
        self._others: list[Restore] = []

    def keep(self, value: Any) -> None:
        """Notes what the object holds now."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if not isinstance(value, _KEPT) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if isinstance(value, Tensor):
                self._others.append(_restore_values(value))
            elif isinstance(value, torch.Generator):
                self._others.append(partial(value.set_state, value.get_state()))
            else:
                kept = dict(value) if isinstance(value, dict) else tuple(value)
                self._containers.append((value, kept))
                waiting.extend(kept.values() if isinstance(kept, dict) else kept)

    def restore(self) -> None:
        """Puts it back."""
        for container, kept in self._containers:
            if isinstance(container, tuple):
                continue
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(kept)
            else:
                container.update(kept)
        for restore in self._others:
            restore()


def _restore_values(tensor: Tensor) -> Restore:
    if tensor.is_meta or tensor.is_inference() or tensor.layout is not torch.strided:
        return _nothing
    kept = tensor.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            # Overlapping views such as an expanded range cannot be written to, and so never change.
            if not torch.equal(tensor, kept):
                tensor.copy_(kept)

    return restore


def _renormalized(module: nn.Module) -> list[Tensor]:
    """Parameters that the module's own forward changes: embeddings with ``max_norm``."""
    return list(module.parameters(recurse=False)) if getattr(module, "max_norm", None) is not None else []


@contextmanager
def _other_generators() -> Iterator[None]:
    """Restores the generators of ``random`` and, if it is loaded, NumPy."""
    numpy = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)


def _nothing() -> None:
    return None
