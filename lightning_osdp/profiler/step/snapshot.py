"""Snapshots of a module and the objects that it holds, to undo the changes of a training step."""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copyreg import _slotnames  # type: ignore[attr-defined]  # names of all slots of a class, those of its bases too
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Restore = Callable[[], object]
_CONSTANTS = {type(None), bool, int, float, complex, str, bytes, FunctionType, MethodType, BuiltinFunctionType, type}
_EMPTIED = {dict, OrderedDict, list, set, deque}
_LEFT_ALONE = {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_osdp"}
"""Packages whose objects are not restored, such as trainers, loaders, datasets and optimizers."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested sequences, mappings, and objects that can be moved ``.to`` a device or are dataclasses.

    Modules are not searched.
    """
    return _tensors_in(value, set())


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, nn.Module) or id(value) in seen:
        return
    if isinstance(value, Mapping):
        inner: Any = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    elif hasattr(type(value), "to") or hasattr(type(value), "__dataclass_fields__"):
        inner = getattr(value, "__dict__", {}).values()
    else:
        return
    seen.add(id(value))
    for item in inner:
        yield from _tensors_in(item, seen)


def storage_key(tensor: Tensor) -> int | None:
    """Key of a tensor's storage, unique while the storage is alive; None for a tensor that is not strided."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None


@contextmanager
def untouched(
    module: nn.Module, *, left_out: Iterable[Tensor] = (), changed: Collection[nn.Parameter] = ()
) -> Iterator[None]:
    """Restores, on exit, buffers, gradients, training flags, attributes and the random number generators.

    Inside, there are no gradients. Objects that a module holds get their contents back, and so do the objects that they
    hold: tensors, NumPy arrays, generators of random numbers, lists, tuples, dicts, sets, deques, and attributes of
    other objects (counters, meters, metric states, collected losses). Objects of torch, Lightning and the standard
    library, classes, functions and their closures are not searched. Items that an iterator has given do not come back.
    Parameters are left alone, but for those that forward itself changes and ``changed``; so are tensors ``left_out``.
    """
    restores = _restores(map(vars, module.modules()), left_out=(*module.parameters(), *left_out))
    # embeddings with max_norm change their own weight in forward
    renormalized = [m for m in module.modules() if getattr(m, "max_norm", None) is not None]
    written = dict.fromkeys((*changed, *(p for m in renormalized for p in m.parameters(recurse=False))))
    restores += filter(None, map(_restore_values, written))
    restores += _random_states()
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    # undoes `p.data = ...`
    storages = [(p, p.data) for p in module.parameters() if type(p.data) is Tensor and not p.is_meta]
    try:
        yield
    finally:
        for parameter, data in storages:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        for restore in restores:
            restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def snapshot(module: nn.Module, *others: Any) -> Callable[[], None]:
    """Notes what a step changes besides parameters and gradients; returns a function that restores it.

    Parameters may be other ones by then, as sharded ones are for gathered ones.

    Args:
        module: the model, whose objects are restored as `untouched` does.
        *others: objects that are restored likewise.
    """
    children = list(module.modules())
    restores = _restores([*map(vars, children), *others], left_out=[child._parameters for child in children])
    restores += _random_states()

    def restore() -> None:
        for each in restores:
            each()

    return restore


def iterators_in(module: nn.Module) -> list[str]:
    """Names of attributes that are iterators, from which a training step may take items that do not come back."""
    return [
        ".".join(filter(None, (name, key)))
        for name, child in module.named_modules()
        for key, value in vars(child).items()
        if hasattr(type(value), "__next__")
    ]


def _random_states() -> list[Restore]:
    """Functions that restore the generators of random numbers that steps draw from."""
    restores: list[Restore] = [
        partial(random.setstate, random.getstate()),
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if numpy := sys.modules.get("numpy"):
        restores.append(partial(numpy.random.set_state, numpy.random.get_state()))
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    restores += [partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(each), each) for each in devices]
    return restores


def _restores(values: Iterable[Any], left_out: Iterable[object]) -> list[Restore]:
    """Functions that restore the contents of objects, however deep they lie in each other.

    A second try of a micro-batch asks for this before each one: most values of a module are numbers and empty dicts.
    """
    empty: list[Any] = []
    restores: list[Restore] = [partial(_empty, empty)]
    waiting, seen = list(values), {id(each) for each in left_out}
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in _CONSTANTS or id(value) in seen:
            continue
        if kind in _EMPTIED and not value:
            empty.append(value)
            continue
        if isinstance(value, nn.Parameter):  # of a module that is no child
            continue
        seen.add(id(value))
        if isinstance(value, (dict, list, tuple, set, deque)):
            kept = dict(value) if isinstance(value, dict) else tuple(value)
            if not isinstance(value, tuple):
                restores.append(partial(_refill, value, kept))
            waiting.extend(kept.values() if isinstance(kept, dict) else kept)
        elif (restore := _restore_state(value)) is not None:
            restores.append(restore)
        if is_user_object(value):
            slots = slots_of(value)
            restores += [partial(_set_slot, value, name, kept) for name, kept in slots.items()]
            waiting.extend((*slots.values(), getattr(value, "__dict__", None)))
    return restores


def _empty(containers: Iterable[Any]) -> None:
    for container in containers:
        if container:
            container.clear()


def slots_of(value: Any) -> dict[str, Any]:
    """Attributes of an object in slots; the value is `_UNSET` where a slot is empty."""
    return {name: getattr(value, name, _UNSET) for name in _slotnames(type(value))}


def _refill(container: Any, kept: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(kept)
    else:
        container.update(kept)


_UNSET = object()


def is_user_object(value: Any) -> bool:
    """Tells if the attributes of an object are restored: it is a module, a namespace, or of no package left alone."""
    kind: Any = type(value)
    return _is_kind_of_users(kind)


@lru_cache(maxsize=10_000)
def _is_kind_of_users(kind: type) -> bool:
    if issubclass(kind, (nn.Module, SimpleNamespace, Namespace)):
        return True
    packages = {str(base.__module__).partition(".")[0] for base in kind.__mro__}
    return not is_left_alone(str(kind.__module__)) and not packages & _LEFT_ALONE and not issubclass(kind, type)


def is_left_alone(name: str) -> bool:
    """Tells if a Python module, given by its name, is of the standard library or of a package left alone."""
    package = name.partition(".")[0]
    return package in sys.stdlib_module_names or package in _LEFT_ALONE


def _set_slot(holder: Any, name: str, value: Any) -> None:
    if value is not _UNSET:
        object.__setattr__(holder, name, value)
    elif hasattr(holder, name):
        object.__delattr__(holder, name)


def _restore_state(value: Any) -> Restore | None:
    """Function that restores a tensor, an array or a generator of random numbers; None for any other value."""
    restore: Restore | None = None
    numpy = sys.modules.get("numpy")
    if isinstance(value, Tensor):
        restore = _restore_values(value)
    elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        restore = partial(value.setstate, value.getstate())
    elif isinstance(value, torch.Generator) or (numpy and isinstance(value, numpy.random.RandomState)):
        restore = partial(value.set_state, value.get_state())
    elif numpy and isinstance(value, numpy.random.Generator):
        restore = partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif numpy and isinstance(value, numpy.ndarray) and value.flags.writeable and not isinstance(value, numpy.memmap):
        # a read-only array stays as it is, and a file of data may be larger than memory
        restore = partial(value.__setitem__, ..., value.copy())
    return restore


def _restore_values(tensor: Tensor) -> Restore | None:
    if tensor.is_meta or tensor.is_inference() or tensor.layout is not torch.strided:
        return None
    kept = tensor.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            # Overlapping views such as an expanded range cannot be written to, and so never change.
            if not torch.equal(tensor, kept):
                tensor.copy_(kept)

    return restore
