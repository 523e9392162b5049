"""State of a module after a step on a whole batch, compared with its state after steps on the batch's halves."""

from __future__ import annotations

import math
import numbers
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_osdp.profiler.step.fake_model import written_by
from lightning_osdp.profiler.step.run_step import as_eager, dropping_nothing, halves_of, samples_of
from lightning_osdp.profiler.step.snapshot import is_user_object, slots_of, storage_key

_CLOSE = 1e-4
"""Relative difference by rounding between values computed from a batch and from its halves."""
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training", "_buffers"}
"""Attributes of a module that torch keeps for itself, or under other names."""


def why_state_differs(module: nn.Module, run: Callable[[Any], Any], batch: Any, *, batch_size: int) -> str | None:
    """Names a part of a module's state that differs between a step on a batch and steps on its halves; None if none.

    State is buffers, parameters, attributes, and all that is reachable from them, but for generators of random numbers.
    A tensor that a step writes to in place differs whatever its values are, for they may be at a fixed point, such as
    an average that begins where its weights do. Metrics of torchmetrics are compared by the values that they compute.
    The module is left as it was.
    """
    first, second, *_ = (samples_of(batch, batch_size, half) for half in halves_of(batch_size))
    states = []
    for batches in ([batch], [first, second]):
        with as_eager(module), dropping_nothing(module, seed=0), _writes(module) as writes:
            for each in batches:
                run(each)
            states.append(dict(_leaves(module)))
        if writes.before:
            return f"a step writes to {next(iter(writes.before))}"
    one, other = states
    paths = dict.fromkeys((*one, *other))
    path = next((path for path in paths if not _is_close(one.get(path, _NOTHING), other.get(path, _NOTHING))), None)
    return None if path is None else f"{path} is another after a batch than after its halves"


_NOTHING = object()


def _leaves(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Values to compare, with their paths: numbers, texts, copies of tensors, and sizes of containers."""
    for path, value in _reached(module):
        if isinstance(value, Tensor):
            yield path, value.detach().clone()
        elif _is_array(value):
            yield path, torch.from_numpy(value.copy()) if value.dtype.kind in "biuf" else value.tolist()
        else:
            yield path, value


def _reached(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tensors, arrays, numbers and texts reachable from a module, and sizes of containers, each with its path."""
    waiting: list[tuple[str, Any]] = [("", module)]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, (Tensor, numbers.Number, str, bytes, type(None))) or _is_array(value):
            yield path, value
            continue
        if id(value) in seen or _is_random(value):
            continue
        seen.add(id(value))
        inner: dict[str, Any] = {}
        if hasattr(type(value), "__next__"):
            yield path, object()  # nobody can tell how many items an iterator has given: it equals nothing
        elif _is_metric(value):
            inner = {"": _computed(value)}
        elif isinstance(value, dict):
            yield f"{path} (keys)", [*map(str, value)]
            inner = {f"[{key!r}]": each for key, each in value.items()}
        elif isinstance(value, (list, tuple, deque, set, frozenset)):
            yield f"{path} (entries)", len(value)
            inner = {f"[{index}]": each for index, each in enumerate(value)}
        elif is_user_object(value):
            attributes = {**slots_of(value), **getattr(value, "__dict__", {})}
            if isinstance(value, nn.Module):
                attributes = {name: each for name, each in attributes.items() if name not in _TORCH_ATTRIBUTES}
                attributes |= dict(value.named_parameters(recurse=False)) | dict(value.named_children())
                attributes |= attributes.pop("_buffers", {})
            inner = {f".{name}" if path else name: each for name, each in attributes.items()}
        waiting.extend((path + name, each) for name, each in inner.items())


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided or one.is_meta:
            return one is other
        return torch.allclose(one.double(), other.double(), rtol=_CLOSE, atol=_CLOSE**2, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_CLOSE) or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and bool(one == other)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_random(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (random.Random, torch.Generator, *kinds))


def _is_metric(value: Any) -> bool:
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def _computed(metric: Any) -> Any:
    """Values that a metric computes from this rank's batches, or its error; the metric caches none of them."""
    try:
        values = type(metric).compute(metric) if metric.update_called else None
    except Exception as error:  # too few samples for the metric, which is no difference where both steps have them
        return str(error)
    return tree_map_only(Tensor, torch.clone, values)


class _Writes(TorchDispatchMode):
    """Record of the tensors that operations write to in place.

    Attributes:
        before: path of a tensor that was written to -> the tensor, and a copy of it from before the first write.
    """

    def __init__(self, places: dict[int, tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places
        self.before: dict[str, tuple[Tensor, Tensor]] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}) if func._schema.is_mutable else ():
            path, place = self._places.get(storage_key(tensor) or 0, ("", tensor))
            if path and path not in self.before:
                self.before[path] = place, place.clone()
        return func(*args, **(kwargs or {}))


@contextmanager
def _writes(module: nn.Module) -> Iterator[_Writes]:
    """Records writes to tensors that are reachable from a module while it is active, and undoes them on exit."""
    tensors = ((path, value) for path, value in _reached(module) if isinstance(value, Tensor))
    writes = _Writes({storage_key(value) or 0: (path, value.detach()) for path, value in tensors})
    try:
        with writes:
            yield writes
    finally:
        for tensor, kept in writes.before.values():
            tensor.copy_(kept)
