"""Saved tensors in host memory from a block's forward to its backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from lightning_osdp.apply.internals import local, whole_storages


class HostMemory:
    """What the blocks of one model have on the host; on CPU that is a copy in memory, counted here and nowhere else.

    Args:
        device: what is copied from; tensors on other kinds of devices stay where they are.

    Attributes:
        current_bytes: now on the host.
        peak_bytes: most that ever were.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.current_bytes = 0
        self.peak_bytes = 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def saves_for(self, block: nn.Module) -> AbstractContextManager[Any]:
        """Within it, what autograd saves goes to the host, each storage once; parameters and buffers stay.

        Args:
            block: whose forward runs in it, with its own parameters gathered.
        """
        staying = frozenset(tensor.untyped_storage()._cdata for tensor in _owned(block))
        # Weak, for autograd holds `pack` as long as anything that it has packed.
        copies: weakref.WeakValueDictionary[tuple[int, int], _HostCopy] = weakref.WeakValueDictionary()

        def pack(tensor: Tensor) -> Tensor | _Saved:
            key = tensor.untyped_storage()._cdata
            if key in staying or not self._takes(tensor):
                return tensor
            # What is changed in place after it was saved is another value.
            copy = copies.setdefault((key, tensor._version), _HostCopy(self))
            return copy.saved(tensor)

        return saved_tensors_hooks(pack, lambda saved: saved.restored() if isinstance(saved, _Saved) else saved)

    def _takes(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == self.device.type
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() % tensor.itemsize == 0
            and not is_traceable_wrapper_subclass(tensor)
        )

    def add(self, num_bytes: int) -> None:
        """So many bytes more are on the host."""
        self.current_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def copying(self) -> AbstractContextManager[Any]:
        """Copies within it do not hold up computing."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def wait_for(self, tensor: Tensor) -> None:
        """What computing does next needs this copy."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            tensor.record_stream(current)


class _HostCopy:
    """One storage on the host, for all tensors that were saved of it."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._host: Tensor | None = None
        self._source: StorageWeakRef | None = None  # its address is not given to another while this lives
        self._back: StorageWeakRef | None = None

    def saved(self, tensor: Tensor) -> _Saved:
        """The tensor as it can be had back; copies its storage if that was not done yet."""
        if self._host is None:
            storage = tensor.untyped_storage()
            self._source = StorageWeakRef(storage)
            flat = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            # Past all modes: what counts the device's bytes does not see it.
            with _disable_current_modes(), self._memory.copying():
                self._host = torch.empty_like(flat, device="cpu", pin_memory=self._memory.device.type == "cuda")
                self._host.copy_(flat, non_blocking=True)
            if self._memory.stream is not None:
                flat.record_stream(self._memory.stream)  # what is freed while it is copied is not given to others
            self._memory.add(storage.nbytes())
            weakref.finalize(self, self._memory.add, -storage.nbytes()).atexit = False
        return _Saved(self, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def on_device(self) -> Tensor:
        """The storage's elements on the device again, the same for all who ask while any of them has it."""
        assert self._host is not None
        storage = None if self._back is None else torch.UntypedStorage._new_with_weak_ptr(self._back.cdata)
        if storage is not None:
            return torch.empty(0, dtype=self._host.dtype, device=self._memory.device).set_(storage)
        with self._memory.copying():
            flat = torch.empty_like(self._host, device=self._memory.device, pin_memory=False)
            flat.copy_(self._host, non_blocking=True)
        self._memory.wait_for(flat)
        self._back = StorageWeakRef(flat.untyped_storage())
        return flat


@dataclass(frozen=True)
class _Saved:
    """What autograd holds in place of a tensor."""

    copy: _HostCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def restored(self) -> Tensor:
        flat = self.copy.on_device()
        return flat.view(self.dtype).as_strided(self.size, self.stride, self.offset)


def _owned(block: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of a block, those of units inside it as they will be gathered."""
    yield from (local(parameter) for parameter in block.parameters())
    yield from block.buffers()
    yield from whole_storages(block)
