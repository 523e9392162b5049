"""Leaves no trace: runs a training step for its cost alone and puts everything back that it changed."""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from copyreg import _slotnames  # type: ignore[attr-defined]  # names of all slots of a class, those of its bases too
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Restore = Callable[[], object]
_LEFT_ALONE = {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_osdp"}
"""Packages whose objects a step does not change or has its own ways to: trainers, loaders, datasets, optimizers."""


@contextmanager
def untouched(
    module: nn.Module, *, left_out: Iterable[Tensor] = (), changed: Collection[nn.Parameter] = ()
) -> Iterator[None]:
    """Restores, on exit, buffers, gradients, training flags, attributes and the random number generators.

    Inside, there are no gradients. Whatever a module holds gets its contents back, and what that holds, and so on:
    tensors, NumPy arrays, generators of random numbers, lists, tuples, dicts, sets, deques, and attributes of other
    objects (counters, meters, metric states, collected losses). Not looked into are objects of torch, Lightning and
    the standard library, classes, functions and what they close over; nothing brings back what an iterator has given.

    Args:
        module: what is run. Its parameters are left alone, but for those that forward itself changes.
        left_out: further tensors that are left alone.
        changed: parameters that the step is known to change, such as an average of others.
    """
    snapshot = _Snapshot(left_out=(*module.parameters(), *left_out))
    for child in module.modules():
        snapshot.keep(vars(child))
    written = dict.fromkeys((*changed, *(p for m in module.modules() for p in _renormalized(m))))
    restores = [snapshot.restore, *map(_restore_values, written)]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    plain = [p for p in module.parameters() if type(p.data) is Tensor and not p.is_meta]
    storages = [(p, p.data) for p in plain]  # for `p.data = ...`
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices), _other_generators():
            yield
    finally:
        for parameter, data in storages:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        for restore in restores:
            restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def iterators_in(module: nn.Module) -> list[str]:
    """Names of attributes that are iterators, of which a training step may take what nobody can put back."""
    return [
        ".".join(filter(None, (name, key)))
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        if hasattr(type(value), "__next__")
    ]


class _Snapshot:
    """Contents of objects, however deep they lie in each other; kept flat, for a model has many."""

    def __init__(self, left_out: Iterable[Tensor]) -> None:
        self._seen = {id(tensor) for tensor in left_out}
        self._containers: list[tuple[Any, Any]] = []
        self._others: list[Restore] = []

    def keep(self, value: Any) -> None:
        """Notes what the object holds now."""
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if id(value) in self._seen or isinstance(value, nn.Parameter):  # of a module that is no child of this one
                continue
            self._seen.add(id(value))
            if isinstance(value, (dict, list, tuple, set, deque)):
                kept = dict(value) if isinstance(value, dict) else tuple(value)
                self._containers.append((value, kept))
                waiting.extend(kept.values() if isinstance(kept, dict) else kept)
            elif (restore := _restore_state(value)) is not None:
                self._others.append(restore)
            if _is_looked_into(value):
                slots = {name: getattr(value, name, _UNSET) for name in _slotnames(type(value))}
                self._others += [partial(_set_slot, value, name, kept) for name, kept in slots.items()]
                waiting.extend((*slots.values(), getattr(value, "__dict__", None)))

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


_UNSET = object()


def _is_looked_into(value: Any) -> bool:
    """Whether attributes of an object come back."""
    if isinstance(value, (nn.Module, SimpleNamespace, Namespace)):
        return True
    kind = type(value)
    packages = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    own = str(kind.__module__).partition(".")[0]
    return own not in sys.stdlib_module_names and not packages & _LEFT_ALONE and not isinstance(value, type)


def _set_slot(holder: Any, name: str, value: Any) -> None:
    if value is not _UNSET:
        object.__setattr__(holder, name, value)
    elif hasattr(holder, name):
        object.__delattr__(holder, name)


def _restore_state(value: Any) -> Restore | None:
    """What gives a tensor, an array or a generator of random numbers its state back; None for other objects."""
    found: Restore | None = None
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor):
        found = _restore_values(value)
    elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        found = partial(value.setstate, value.getstate())
    elif isinstance(value, torch.Generator) or (numpy and isinstance(value, numpy.random.RandomState)):
        found = partial(value.set_state, value.get_state())
    elif numpy and isinstance(value, numpy.random.Generator):
        found = partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif numpy and isinstance(value, numpy.ndarray):
        # such as of a file of data: nobody can write to it, or there may be more of it than there is memory
        is_left = not value.flags.writeable or isinstance(value, numpy.memmap)
        found = _nothing if is_left else partial(value.__setitem__, ..., value.copy())
    return found


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
