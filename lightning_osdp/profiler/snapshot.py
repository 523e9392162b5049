"""Leaves no trace: runs a training step for its cost alone and puts everything back that it changed."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Restore = Callable[[], object]


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restores, on exit, buffers, gradients, training flags, attributes and the random number generators.

    Inside, there are no gradients. Tensors, generators and nested lists, tuples, dicts, sets and deques that a module
    holds (counters, metric states, collected losses) get their contents back; other objects are not looked into.
    """
    seen: set[int] = {id(parameter) for parameter in module.parameters()}
    restores = [_restore(vars(m), seen) for m in module.modules()]
    restores += [_restore_values(p) for m in module.modules() for p in _renormalized(m)]
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


def _restore(value: Any, seen: set[int]) -> Restore:
    """What puts an object's contents back, however deep they lie in containers."""
    if id(value) in seen:
        return _nothing
    seen.add(id(value))
    restore: Restore = _nothing
    if isinstance(value, Tensor):
        restore = _restore_values(value)
    elif isinstance(value, torch.Generator):
        restore = partial(value.set_state, value.get_state())
    elif isinstance(value, (list, deque)):
        restore = _restore_container(value, list(value), list(value), value.extend, seen)
    elif isinstance(value, set):
        restore = _restore_container(value, set(value), [], value.update, seen)
    elif isinstance(value, tuple):
        restore = partial(_restore_all, [_restore(item, seen) for item in value])
    elif isinstance(value, dict):
        restore = _restore_container(value, dict(value), list(value.values()), value.update, seen)
    return restore


def _restore_container(
    container: Any, kept: Any, items: list[Any], refill: Callable[[Any], object], seen: set[int]
) -> Restore:
    inner = [restore for restore in (_restore(item, seen) for item in items) if restore is not _nothing]

    def restore() -> None:
        container.clear()
        refill(kept)
        for restore_item in inner:
            restore_item()

    return restore


def _restore_all(restores: list[Restore]) -> None:
    for restore in restores:
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
