"""Tensors in what users hold them in: batches and attributes of modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested sequences, mappings, and objects that can be moved ``.to`` a device or are dataclasses."""
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
