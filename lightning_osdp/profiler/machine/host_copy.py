"""Seconds that a byte takes to host memory and back, for what is offloaded."""

from __future__ import annotations

import time

import torch

from lightning_osdp.profiler.timing.step_time import synchronize

_NUM_BYTES = 16 * 1024**2
_REPEATS = 5


def measure_host_copy(device: torch.device) -> float:
    """Seconds per byte of a copy from the device to host memory, the fastest of a few; on CPU of a copy in memory.

    Copies back are taken to be as fast.

    Args:
        device: where the model trains.
    """
    there = torch.zeros(_NUM_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(_NUM_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    best = float("inf")
    for _ in range(_REPEATS + 1):
        synchronize(device)
        start = time.perf_counter()
        here.copy_(there, non_blocking=True)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best / _NUM_BYTES
