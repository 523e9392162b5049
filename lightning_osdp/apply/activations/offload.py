"""Saved tensors in host memory from a block's forward to its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from lightning_osdp.apply.internals import dtensors, gathering
from lightning_osdp.planner.engine import BLOCKS_IN_FLIGHT
from lightning_osdp.planner.engine.layout import pinned_bytes


class CopyStream:
    """Stream on a CUDA device for copies to and from the host, which run beside computing, in turn.

    Memory that is copied to or from must live until computing has waited for the copy: the caller holds it.
    ``record_stream`` is no alternative: Python runs ahead of the device, and memory that it frees could not be reused
    before the device had come there.

    [Run on one GPU by `benchmarks/gpu_check.py`, and tested with a stream that copies as late as it may.]
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, to: Tensor, of: Tensor) -> Any:
        """Begins a copy once computing has come here; returns a mark of its end, for `wait`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(of, non_blocking=True)
            return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Makes later computing wait for the end of a copy; the host does not wait."""
        torch.cuda.current_stream(self._device).wait_event(mark)


class HostMemory:
    """Host memory of the blocks of one model; on CPU it is a copy in memory, counted here and nowhere else.

    Tensors on other kinds of devices stay where they are. Copies run beside computing in a stream: on CUDA one is made
    if none is given.
    """

    def __init__(self, device: torch.device, stream: CopyStream | None = None) -> None:
        self.device = device
        self.current_bytes = 0
        self.peak_bytes = 0
        self.stream = CopyStream(device) if stream is None and device.type == "cuda" else stream
        self._leaving: list[_Call] = []  # calls whose copies may not have ended
        self._latest: Callable[[], _Call | None] = lambda: None

    @contextmanager
    def saves_for(self, block: nn.Module) -> Iterator[None]:
        """Copies tensors that the block saves to the host, each storage once; parameters and buffers stay."""
        # Storages of units inside it are empty now, and filled when they are gathered.
        owned = chain(map(dtensors.local, block.parameters()), block.buffers(), gathering.whole_storages(block))
        staying = frozenset(tensor.untyped_storage()._cdata for tensor in owned)
        call = _Call(self, before=self._latest)
        self._latest = weakref.ref(call)

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            key = tensor.untyped_storage()._cdata
            if key in staying or not self._takes(tensor):
                return tensor
            # A new version is another value: the tensor was changed in place after it was saved.
            copy = call.copies.setdefault((key, tensor._version), _HostCopy(call))
            return copy.saved(tensor)

        with saved_tensors_hooks(pack, lambda saved: saved if isinstance(saved, Tensor) else saved()):
            try:
                yield
            finally:
                self._leaving.append(call)
                self.let_go(but=BLOCKS_IN_FLIGHT - 1)

    def let_go(self, *, but: int) -> None:
        """Makes computing wait for copies to the host of all blocks but this many, the latest."""
        last = len(self._leaving) - but
        for call in self._leaving[:last]:
            call.let_go()
        del self._leaving[:last]

    def _takes(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == self.device.type
            and tensor.layout is torch.strided
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() % tensor.itemsize == 0
            and not is_traceable_wrapper_subclass(tensor)
        )

    def taken_bytes(self, num_bytes: int) -> int:
        """Bytes of host memory that a tensor takes: torch's allocator rounds pinned memory up to a power of two."""
        return pinned_bytes(num_bytes) if self.device.type == "cuda" else num_bytes

    def add(self, num_bytes: int) -> None:
        """Counts bytes that are added to the host, or removed if negative."""
        self.current_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)


class _Call:
    """Tensors on the host of one call of a block; ``before`` gives the call before it.

    Attributes:
        copies: copies by address and version of the copied storage. They are weak: autograd holds `pack`, which holds
            this, as long as anything that it has packed.
        sources: storages on the device, while they are copied.
        mark: end of the copies.
    """

    def __init__(self, memory: HostMemory, before: Callable[[], _Call | None]) -> None:
        self.memory = memory
        self.copies: weakref.WeakValueDictionary[tuple[int, int], _HostCopy] = weakref.WeakValueDictionary()
        self.sources: list[torch.UntypedStorage] = []
        self.mark: Any = None
        self._before, self._has_come_back = before, False

    def let_go(self) -> None:
        """Lets later computing use the memory on the device again."""
        if self.memory.stream is not None and self.sources:
            self.memory.stream.wait(self.mark)
        self.sources.clear()

    def come_back(self) -> None:
        """Begins backward: copies of this call and of the one before come back beside computing."""
        if self.memory.stream is None or self._has_come_back:
            return
        self._has_come_back = True
        self.memory.let_go(but=0)
        before = self._before()
        for call in (self,) if before is None else (self, before):
            for copy in list(call.copies.values()):
                copy.fetch()


class _HostCopy:
    """Storage on the host, for all tensors that were saved of it."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self._host: Tensor | None = None
        self._source: StorageWeakRef | None = None  # its address is not given to another while this lives
        self._coming: tuple[Tensor, Any] | None = None  # and what marks that it is there
        self._back: StorageWeakRef | None = None

    def saved(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copies the storage if that was not done yet; returns a function that gives the tensor back."""
        if self._host is None:
            call, memory, storage = self.call, self.call.memory, tensor.untyped_storage()
            self._source = StorageWeakRef(storage)
            flat = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            # Outside all modes: a mode that counts bytes of the device must not see it.
            with _disable_current_modes():
                self._host = torch.empty_like(flat, device="cpu", pin_memory=memory.device.type == "cuda")
                if memory.stream is None:
                    self._host.copy_(flat, non_blocking=True)
                else:
                    call.mark = memory.stream.copy(self._host, flat)
                    call.sources.append(storage)  # no view, which knows its graph
            taken_bytes = memory.taken_bytes(storage.nbytes())
            memory.add(taken_bytes)
            weakref.finalize(self, memory.add, -taken_bytes).atexit = False
        return partial(self._restored, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _restored(self, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        self.call.come_back()
        return self.on_device().view(dtype).as_strided(size, stride, offset)

    def fetch(self) -> None:
        """Begins to copy the storage to the device again, unless it is there or on its way."""
        if self._host is None or self._coming is not None or self._storage() is not None:
            return
        memory = self.call.memory
        flat = torch.empty_like(self._host, device=memory.device, pin_memory=False)
        if memory.stream is None:
            flat.copy_(self._host, non_blocking=True)
            self._coming = flat, None
        else:
            self._coming = flat, memory.stream.copy(flat, self._host)

    def on_device(self) -> Tensor:
        """Elements of the storage on the device again, shared by all who ask while any of them has it."""
        assert self._host is not None
        storage = self._storage()
        if storage is not None:
            return torch.empty(0, dtype=self._host.dtype, device=self.call.memory.device).set_(storage)
        self.fetch()
        flat = self._arrived()
        assert flat is not None
        self._back = StorageWeakRef(flat.untyped_storage())
        return flat

    def _storage(self) -> torch.UntypedStorage | None:
        """Storage on the device, if anybody has it."""
        return None if self._back is None else torch.UntypedStorage._new_with_weak_ptr(self._back.cdata)

    def _arrived(self) -> Tensor | None:
        """Copy that was on its way to the device, once computing may use it."""
        if self._coming is None:
            return None
        (flat, mark), self._coming = self._coming, None
        if self.call.memory.stream is not None:
            self.call.memory.stream.wait(mark)
        return flat

    def __del__(self) -> None:
        self._arrived()  # memory of a copy that nobody wanted is not free before the copy has ended
