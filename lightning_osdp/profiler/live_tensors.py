"""Live tensors: bytes counted exactly while operations run, and a census of all tensors that Python can reach."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.operations.splitting import JoinedShards


class LiveBytes(TorchDispatchMode):
    """Live and peak bytes of the storages on one kind of device: what a memory limit means on every device.

    While the mode is active, it counts the storage of every tensor that an operation returns. Tensors that were there
    before must be named with `track`. A storage leaves the count when it is freed, even while the mode is not active.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``; tensors elsewhere do not count.
        memory_limit_bytes: bytes that may live while the mode is active; an operation that exceeds them raises a
            `MemoryError`.

    Example:
        >>> with LiveBytes("cpu") as live:
        ...     kept = torch.zeros(1000, dtype=torch.float32) + 1
        >>> live.current_bytes, live.peak_bytes
        (4000, 8000)
    """

    supports_higher_order_operators = True

    def __init__(self, device_type: str, *, memory_limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        self.peak_bytes = 0
        self.device_type = device_type
        self._limit_bytes = memory_limit_bytes
        self._sizes: dict[int, int] = {}
        self._left_out: dict[int, torch.UntypedStorage] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # a tenth of what `weakref.finalize` takes

    @property
    def is_active(self) -> bool:
        """True while the mode is entered and not left."""
        return self in _counting

    def track(self, tensors: Iterable[Tensor]) -> int:
        """Counts tensors that exist already; returns the bytes that this added."""
        before = self.current_bytes
        for tensor in tensors:
            self._count(tensor)
        return self.current_bytes - before

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Counts the storages of these tensors no more: on CPU, what stands for memory of the host."""
        found = {key: storage for key, (_, storage) in _storages(tensors).items()}
        for key in found.keys() & self._sizes.keys():
            self._forget(key)
        self._left_out |= found

    @staticmethod
    def pass_through(num_bytes: int, device_type: str) -> None:
        """Counts bytes that come and go within an operation in the peak of each active mode of this kind of device."""
        for live in dict.fromkeys(_counting):
            if live.device_type == device_type:
                live.peak_bytes = max(live.peak_bytes, live.current_bytes + num_bytes)

    def reset_peak(self) -> None:
        """Starts a new peak from what is live now."""
        self.peak_bytes = self.current_bytes

    def _count(self, tensor: Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self.device_type or tensor.layout is not torch.strided:
            return
        if isinstance(tensor, JoinedShards):
            return  # its pieces are tensors of their own, which count
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._left_out:
            return
        if key not in self._sizes:
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._set(key, storage.nbytes())

    def _set(self, key: int, num_bytes: int) -> None:
        self.current_bytes += num_bytes - self._sizes.get(key, 0)
        self._sizes[key] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        if self._limit_bytes is not None and self.current_bytes > self._limit_bytes and self.is_active:
            taken, limit = format_bytes(self.current_bytes), format_bytes(self._limit_bytes)
            raise MemoryError(f"live tensors take {taken}, the limit is {limit}")

    def _forget(self, key: int) -> None:
        del self._references[key]
        self.current_bytes -= self._sizes.pop(key)

    def __enter__(self) -> LiveBytes:
        if not _counting:
            # fully_shard frees and allocates unsharded parameters by resizing their storage, past the dispatcher.
            torch.UntypedStorage.resize_ = _counted_resize  # type: ignore[method-assign, assignment]
            # torch compiles nothing under a mode, and raises for what is to be compiled whole
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._count(result)
        else:
            self.track(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


_resize = torch.UntypedStorage.resize_
_while_counting = ExitStack()
_counting: list[LiveBytes] = []
"""Modes that are entered, in any order: one may be left before another that was entered after it."""


def _counted_resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for live in dict.fromkeys(_counting):
        if storage._cdata in live._sizes:
            live._set(storage._cdata, storage.nbytes())
    return result


class Census:
    """Storages in the memory of the CPU that are alive now; `newer` tells which have come alive since then.

    Python's objects are searched for tensors, and tensors for gradients. The search misses sparse tensors, and tensors
    that only a graph of autograd holds. A million objects take less than a second.

    Example:
        >>> census = Census()
        >>> kept = torch.zeros(2, 3)
        >>> [tensor.shape for tensor in census.newer()]
        [torch.Size([2, 3])]
    """

    def __init__(self) -> None:
        self._known = {key: weakref.ref(storage) for key, (_, storage) in self._live_storages().items()}

    def newer(self, *, besides: Iterable[Tensor] = ()) -> list[Tensor]:
        """One tensor of each storage that has come alive since, without those of ``besides`` and their gradients."""
        found = self._live_storages()
        old = {key: known for key, reference in self._known.items() if (known := reference()) is not None}
        left_out = old.keys() | _storages(besides).keys()
        addresses = {storage.data_ptr() for storage in old.values()}  # a numpy array may be behind several storages
        newer = []
        for key, (tensor, storage) in found.items():
            if key not in left_out and storage.data_ptr() not in addresses:
                addresses.add(storage.data_ptr())
                newer.append(tensor)
        return newer

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Takes these tensors for alive before."""
        found = _storages(tensors)
        self._known |= {key: weakref.ref(storage) for key, (_, storage) in found.items()}

    def _live_storages(self) -> dict[int, tuple[Tensor, torch.UntypedStorage]]:
        """Storages that are alive, but for those in which torch notes the ranks of a mesh."""
        everything = gc.get_objects()
        # `type(each)` and not `isinstance`: a proxy for another object may claim to be a tensor. There are half a
        # million objects of a few thousand types.
        types = {each for each in set(map(type, everything)) if issubclass(each, (Tensor, DeviceMesh))}
        objects = [*compress(everything, map(types.__contains__, map(type, everything)))]
        # `mesh` is a view of `_rank_map` that asks for this rank, whose process group may be gone
        meshes = _storages(each._rank_map for each in objects if isinstance(each, DeviceMesh))
        found = _storages(each for each in objects if isinstance(each, Tensor))
        return {key: each for key, each in found.items() if key not in meshes}


def _storages(tensors: Iterable[Tensor]) -> dict[int, tuple[Tensor, torch.UntypedStorage]]:
    """Storages in the memory of the CPU, each with a tensor, by a key that is unique while they are alive."""
    found = {}
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in chain.from_iterable(map(_with_gradient, tensors)):
            storage = tensor.untyped_storage()
            if storage.device.type == "cpu" and storage.nbytes() > 0:  # a fake tensor's is elsewhere
                found[storage._cdata] = tensor, storage
    return found


def _with_gradient(tensor: Tensor) -> Iterator[Tensor]:
    """Tensor with the memory of ``tensor``, if it has memory of its own, and the tensor with that of its gradient."""
    is_made_of_others = isinstance(tensor, JoinedShards) or is_traceable_wrapper_subclass(tensor)
    if isinstance(tensor, DTensor):
        yield from _with_gradient(tensor._local_tensor)
    elif tensor.layout is torch.strided and not is_made_of_others:
        yield tensor
    if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
        yield from _with_gradient(tensor.grad)
