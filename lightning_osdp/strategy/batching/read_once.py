"""Sources of batches that can be read only once: what profiling read of them is training's to see."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from types import FunctionType
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_osdp.strategy.batching.rebuild import copy_of


class Peeked(IterableDataset[Any]):
    """A source that can be read only once. After it was looked into, it starts once more with what was read.

    Args:
        source: an iterator that never starts again, or a dataset that always gives the same one.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._is_looking = True
        self._read: list[Any] = []
        self._rest: Iterator[Any] | None = None

    def stop_looking(self) -> None:
        """From now on, iterating is for good."""
        self._is_looking = False

    @override
    def __iter__(self) -> Iterator[Any]:
        rest = iter(self.source) if self._rest is None else self._rest
        if self._is_looking:
            self._rest = rest
            return self._remembering(rest)
        read, self._read, self._rest = self._read, [], None
        return chain(read, rest)

    def _remembering(self, rest: Iterator[Any]) -> Iterator[Any]:
        for item in rest:
            self._read.append(item)
            yield item

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # a copy under construction
            raise AttributeError(name)
        return getattr(self.source, name)


def read_once_source(loader: object) -> object | None:
    """What of this loader would lose the items that are read ahead of training: itself, its dataset, or nothing.

    Generators and Python's own iterators never start again. A class with an ``__iter__`` of its own that returns itself
    may; that is taken for granted, with a warning. Workers read copies of a dataset, so it loses nothing to them.
    """
    source = loader
    if isinstance(loader, DataLoader) and loader.num_workers == 0:
        source = loader.dataset
    if not isinstance(source, (Iterator, IterableDataset)):
        return None
    iterator = iter(source)
    if iterator is not iter(source):
        return None
    if isinstance(type(iterator).__iter__, FunctionType):
        rank_zero_warn(
            f"OSDP: profiling reads the first batch of {type(source).__name__}, whose __iter__ gives the same object"
            " each time. If that does not start from the beginning, training starts with the second batch. Have"
            " __iter__ return a new iterator, or pass plan=."
        )
        return None
    return source


def reading(loader: object, peeked: Peeked) -> object:
    """The loader as it was, but on what was looked into in place of its source."""
    return copy_of(loader, dataset=peeked) if isinstance(loader, DataLoader) else peeked
