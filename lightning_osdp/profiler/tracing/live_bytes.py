"""Counts the bytes of live tensor storages, exactly: what a memory limit means on every device.

A dispatch mode sees every tensor that an operation returns; storages leave the count when they are freed or resized.
Tensors that existed before must be named with `track`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.splitting import JoinedShards


class LiveBytes(TorchDispatchMode):
    """Live and peak bytes of the storages on one kind of device while the mode is active.

    Storages that it has counted leave the count when they are freed, even while it is not active.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``; tensors elsewhere do not count.
        memory_limit_bytes: what may live while the mode is active; an operation that exceeds it raises a `MemoryError`.

    Example:
        >>> with LiveBytes("cpu") as live:
        ...     kept = torch.zeros(1000, dtype=torch.float32) + 1
        >>> live.current_bytes, live.peak_bytes
        (4000, 8000)
    """

    def __init__(self, device_type: str, *, memory_limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        self.peak_bytes = 0
        self.device_type = device_type
        self._limit_bytes = memory_limit_bytes
        self._sizes: dict[int, int] = {}

    @property
    def is_active(self) -> bool:
        """Whether it is counting: entered and not left."""
        return self in _counting

    def track(self, tensors: Iterable[Tensor]) -> int:
        """Counts tensors that exist already; returns the bytes that this added."""
        before = self.current_bytes
        for tensor in tensors:
            self._count(tensor)
        return self.current_bytes - before

    def reset_peak(self) -> None:
        """Starts a new peak from what is live now."""
        self.peak_bytes = self.current_bytes

    def _count(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self.device_type or tensor.layout is not torch.strided:
            return
        if isinstance(tensor, JoinedShards):
            return  # its pieces count
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key).atexit = False
        self._set(key, storage.nbytes())

    def _set(self, key: int, num_bytes: int) -> None:
        self.current_bytes += num_bytes - self._sizes.get(key, 0)
        self._sizes[key] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        if self._limit_bytes is not None and self.current_bytes > self._limit_bytes and self.is_active:
            taken, limit = format_bytes(self.current_bytes), format_bytes(self._limit_bytes)
            raise MemoryError(f"live tensors take {taken}, the limit is {limit}")

    def _forget(self, key: int) -> None:
        self.current_bytes -= self._sizes.pop(key, 0)

    def __enter__(self) -> LiveBytes:
        if not _counting:
            # fully_shard frees and allocates unsharded parameters by resizing their storage, past the dispatcher.
            torch.UntypedStorage.resize_ = _counted_resize  # type: ignore[method-assign, assignment]
            # torch compiles nothing under a mode, and raises of what is to be compiled whole
            _while_counting.enter_context(torch.compiler.set_stance("force_eager"))
        _counting.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc_info: object) -> None:
        _counting.remove(self)
        if not _counting:
            torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
            _while_counting.close()
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._sizes:
            self._set(storage._cdata, storage.nbytes())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and counts what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return result


_resize = torch.UntypedStorage.resize_
_while_counting = ExitStack()
_counting: list[LiveBytes] = []
"""Those that are entered, in any order: one may be left before another that was entered after it."""


def _counted_resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for live in dict.fromkeys(_counting):
        live._resized(storage)
    return result
