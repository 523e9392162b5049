"""What a training step leaves behind, compared: after a whole batch, and after its halves one after the other."""

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
from lightning_osdp.profiler.step.snapshot import is_looked_into, slots_of, storage_key

_CLOSE = 1e-4
"""Relative difference, by rounding, of what is computed of a batch and of its halves."""
_OF_TORCH = frozenset(vars(nn.Module())) - {"training", "_buffers"}
"""Attributes of a module that torch keeps for itself, or under other names."""


def why_state_differs(module: nn.Module, run: Callable[[Any], Any], batch: Any, *, batch_size: int) -> str | None:
    """What of a module's state tells a step on a batch from steps on its halves; None if nothing does.

    Buffers, parameters, attributes, and what is reachable from them count, but for generators of random numbers. What
    is written to in place may be at a fixed point, as an average that begins where its weights do: it counts whatever
    its values are. Metrics of torchmetrics count by what they compute. Leaves the module as it was.
    """
    first, second, *_ = (samples_of(batch, batch_size, half) for half in halves_of(batch_size))
    states = []
    for batches in ([batch], [first, second]):
        with as_eager(module), dropping_nothing(module, seed=0), _writes(module) as writes:
            for each in batches:
                run(each)
            states.append(dict(_leaves(module)))
        if writes.paths:
            return f"a step writes to {writes.paths[0]}"
    one, other = states
    paths = dict.fromkeys((*one, *other))
    path = next((path for path in paths if not _agree(one.get(path, _NOTHING), other.get(path, _NOTHING))), None)
    return None if path is None else f"{path} is another after a batch than after its halves"


_NOTHING = object()


def _leaves(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """By path, what is compared: numbers, texts, copies of tensors, and how many things something holds."""
    for path, value in _reached(module):
        if isinstance(value, Tensor):
            yield path, value.detach().clone()
        elif _is_array(value):
            yield path, torch.from_numpy(value.copy()) if value.dtype.kind in "biuf" else value.tolist()
        else:
            yield path, value


def _reached(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """By path, tensors, arrays, numbers and texts that are reachable from a module, and sizes of what holds them."""
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
        found: dict[str, Any] = {}
        if hasattr(type(value), "__next__"):
            yield path, object()  # of what it gave nobody can tell
        elif _is_metric(value):
            found = {"": _computed(value)}
        elif isinstance(value, dict):
            yield f"{path} (keys)", [*map(str, value)]
            found = {f"[{key!r}]": each for key, each in value.items()}
        elif isinstance(value, (list, tuple, deque, set, frozenset)):
            yield f"{path} (entries)", len(value)
            found = {f"[{index}]": each for index, each in enumerate(value)}
        elif is_looked_into(value):
            own = {**slots_of(value), **getattr(value, "__dict__", {})}
            if isinstance(value, nn.Module):
                own = {name: each for name, each in own.items() if name not in _OF_TORCH}
                own |= dict(value.named_parameters(recurse=False)) | dict(value.named_children())
                own |= own.pop("_buffers", {})
            found = {f".{name}" if path else name: each for name, each in own.items()}
        waiting.extend((path + name, each) for name, each in found.items())


def _agree(one: Any, other: Any) -> bool:
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
    """What a metric computes of this rank's batches, or says why it does not; nothing of it is kept."""
    try:
        found = type(metric).compute(metric) if metric.update_called else None
    except Exception as error:  # for want of batches, as a whole one may be, too
        return str(error)
    return tree_map_only(Tensor, torch.clone, found)


class _Writes(TorchDispatchMode):
    """Notes to which of some tensors operations write in place, and puts parameters among them back.

    Attributes:
        paths: of those that were written to.
    """

    def __init__(self, places: dict[int, tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paths: list[str] = []
        self._places, self._kept = places, dict[str, tuple[Tensor, Tensor]]()

    @override
    def __torch_dispatch__(self, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}) if func._schema.is_mutable else ():
            path, place = self._places.get(storage_key(tensor) or 0, ("", tensor))
            if path and path not in self._kept:
                self.paths.append(path)
                self._kept[path] = place, place.clone()
        return func(*args, **(kwargs or {}))

    def put_back(self) -> None:
        """Gives what was written to its values again."""
        for place, kept in self._kept.values():
            place.copy_(kept)


@contextmanager
def _writes(module: nn.Module) -> Iterator[_Writes]:
    """Within it, notes writes to what is reachable from a module; afterwards parameters are as before."""
    tensors = ((path, value) for path, value in _reached(module) if isinstance(value, Tensor))
    writes = _Writes({storage_key(value) or 0: (path, value.detach()) for path, value in tensors})
    try:
        with writes:
            yield writes
    finally:
        writes.put_back()
