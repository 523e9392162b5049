"""Leaves no trace: runs a training step for its cost alone and puts everything back that it changed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_SKIPPED = {"_parameters", "_modules", "_buffers"}


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Restores, on exit, buffers, gradients, training flags, attributes and the random number generators.

    Attributes are restored one level deep: tensors, lists, dicts and sets that a module holds directly (counters,
    metric states, collected losses) get their contents back; the inside of other objects does not.
    """
    modules = list(module.modules())
    attributes = [_copied(m) for m in modules]
    buffers = [{name: None if b is None else b.detach().clone() for name, b in m._buffers.items()} for m in modules]
    kept = [dict(m._buffers) for m in modules]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for m, saved, values, originals in zip(modules, attributes, buffers, kept, strict=True):
            _restore(m, saved)
            m._buffers.clear()
            m._buffers.update(originals)
            for name, value in values.items():
                buffer = m._buffers[name]
                if buffer is not None and value is not None:
                    with torch.no_grad():
                        buffer.copy_(value)


def _copied(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Attribute -> the object itself and a copy of its contents where it can change in place."""
    return {name: (value, _contents(value)) for name, value in module.__dict__.items() if name not in _SKIPPED}


def _contents(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, dict, set):
        return copy.copy(value)
    return None


def _restore(module: nn.Module, saved: dict[str, tuple[Any, Any]]) -> None:
    for name in [name for name in module.__dict__ if name not in saved and name not in _SKIPPED]:
        del module.__dict__[name]
    for name, (value, contents) in saved.items():
        module.__dict__[name] = value
        if isinstance(value, Tensor):
            with torch.no_grad():
                value.copy_(contents)
        elif type(value) is list:
            value[:] = contents
        elif type(value) in (dict, set):
            value.clear()
            value.update(contents)
