"""``torch.cuda`` of a device that is made up: its clock and its memory go on as they are told; nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from lightning_osdp.profiler.machine import stopwatch

_CLOCK_HZ = 1.7e9
_MAKERS = ("empty", "rand", "randn", "tensor", "zeros")
"""Functions whose tensors are on CPU where they were asked for on CUDA."""


class FakeCuda:
    """A device with one stream, and its host: kernels run in order, each once it was issued.

    Args:
        launch_s: what the host takes to issue a kernel.
        total_bytes: of its memory.

    Example:
        >>> device = FakeCuda(launch_s=5e-6)
        >>> for _ in range(3):
        ...     device.launch(1e-6)
        >>> round(device.host_s * 1e6, 6), round(device.device_s * 1e6, 6)
        (15.0, 16.0)
    """

    def __init__(self, *, launch_s: float = 5e-6, total_bytes: int = 2**34) -> None:
        self.launch_s, self.total_bytes = launch_s, total_bytes
        self.host_s = self.device_s = 0.0
        """Now, and when the device has done what was issued so far; in seconds."""
        self.allocated_bytes = self.reserved_bytes = self.peak_bytes = 0
        self.num_waits = 0

    def launch(self, seconds: float) -> None:
        """The host issues a kernel that takes so long."""
        self.host_s += self.launch_s
        self.device_s = max(self.device_s, self.host_s) + seconds

    def allocate(self, num_bytes: int) -> None:
        """Allocates so many bytes, or frees them where negative.

        Raises:
            OutOfMemoryError: there are not so many, in the allocator's words.
        """
        if self.allocated_bytes + num_bytes > self.total_bytes:
            text = f"CUDA out of memory. Tried to allocate {num_bytes / 2**20:.2f} MiB. GPU 0 has a total capacity of"
            raise torch.OutOfMemoryError(f"{text} {self.total_bytes / 2**30:.2f} GiB.")
        self.allocated_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, self.allocated_bytes)

    def wait(self, *_: Any) -> None:
        """The host waits for the device."""
        self.num_waits += 1
        self.host_s = max(self.host_s, self.device_s)

    def _stats(self, *_: Any) -> dict[str, Any]:
        peaks = {
            "requested_bytes": self.peak_bytes,
            "allocated_bytes": self.peak_bytes,
            "active_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
        }
        return {name: {"all": {"peak": peak}} for name, peak in peaks.items()} | {"num_alloc_retries": 0}

    @contextmanager
    def installed(self) -> Iterator[FakeCuda]:
        """Makes ``torch.cuda`` and the clock of `stopwatch` this device's, within the context; tensors stay on CPU."""
        replaced: dict[str, Callable[..., Any]] = {
            "Event": lambda *, enable_timing: _Event(self),
            "Stream": lambda *_: SimpleNamespace(wait_stream=lambda _: None),
            "current_stream": lambda *_: SimpleNamespace(wait_stream=lambda _: None),
            "stream": nullcontext,
            "device": nullcontext,
            "_sleep": lambda cycles: self.launch(cycles / _CLOCK_HZ),
            "synchronize": self.wait,
            "mem_get_info": lambda *_: (self.total_bytes - self.reserved_bytes, self.total_bytes),
            "get_per_process_memory_fraction": lambda *_: 1.0,
            "memory_allocated": lambda *_: self.allocated_bytes,
            "memory_reserved": lambda *_: self.reserved_bytes,
            "max_memory_allocated": lambda *_: self.peak_bytes,
            "memory_stats_as_nested_dict": self._stats,
            "reset_peak_memory_stats": lambda *_: setattr(self, "peak_bytes", self.allocated_bytes),
        }
        with ExitStack() as stack:
            for name, function in replaced.items():
                stack.enter_context(patch.object(torch.cuda, name, function))
            for name in _MAKERS:
                stack.enter_context(patch.object(torch, name, _on_host(getattr(torch, name))))
            # a generator of random numbers of its own, it has none
            stack.enter_context(patch.object(torch.random, "fork_rng", lambda **_: nullcontext()))
            clock = SimpleNamespace(perf_counter=lambda: self.host_s, thread_time=lambda: self.host_s)
            stack.enter_context(patch.object(stopwatch, "time", clock))
            yield self


class _Event:
    """An event of the only stream."""

    def __init__(self, device: FakeCuda) -> None:
        self._device = device
        self.at_s = 0.0

    def record(self, _: Any) -> None:
        self.at_s = max(self._device.device_s, self._device.host_s)

    def query(self) -> bool:
        return self._device.host_s >= self.at_s

    def elapsed_time(self, end: _Event) -> float:
        assert self.query(), "expected an event that has passed"
        assert end.query(), "expected an event that has passed"
        return 1e3 * (end.at_s - self.at_s)


def _on_host(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made
