"""Findings of checks, and the running of checks: one that raises has failed, and the others go on."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.profiler import LiveBytes
from lightning_osdp.profiler.machine.stopwatch import synchronize


@dataclass(frozen=True)
class Finding:
    """One line: whether something is as it must be, and the numbers that say so."""

    name: str
    is_good: bool
    numbers: Mapping[str, Any]

    def __str__(self) -> str:
        numbers = "  ".join(f"{name}={_shown(value)}" for name, value in self.numbers.items())
        return f"{'PASS' if self.is_good else 'FAIL'}  {self.name}: {numbers}"


Check: TypeAlias = Callable[[torch.device], Iterator[Finding]]


def findings_of(name: str, check: Check, device: torch.device) -> Iterator[Finding]:
    """Yields findings of a check as soon as they are there; the last one tells an error, or how long the check took."""
    start = time.perf_counter()
    try:
        yield from check(device)
    except Exception as error:  # whatever is wrong with one check, the others go on
        yield Finding(name, is_good=False, numbers={"error": f"{type(error).__name__}: {error}"[:2000]})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # other processes have the same device
    yield Finding(f"{name} ran", is_good=True, numbers={"seconds": time.perf_counter() - start})


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Peak:
    """Most bytes that came alive: of live tensors on CPU, of the allocator on CUDA."""

    def __init__(self, restart: Callable[[], None], leave_out: Callable[[Iterable[Tensor]], None]) -> None:
        self.num_bytes = 0
        self.restart = restart
        """Forgets the peak so far; what is alive goes on to count."""
        self.leave_out = leave_out
        """Has tensors that are in memory of the host count no more on CPU, where that is the device's."""


@contextmanager
def peak_of(device: torch.device, *tensors: Tensor) -> Iterator[Peak]:
    """The peak within it, beside what was alive before: on CPU these tensors."""
    if device.type == "cuda":
        synchronize(device)
        restart, before = partial(torch.cuda.reset_peak_memory_stats, device), torch.cuda.memory_allocated(device)
        found = Peak(restart, lambda _: None)
        found.restart()
        yield found
        found.num_bytes = torch.cuda.max_memory_allocated(device) - before
    else:
        with LiveBytes(device.type) as live:
            found, before = Peak(live.reset_peak, live.leave_out), live.track(tensors)
            yield found
        found.num_bytes = live.peak_bytes - before
