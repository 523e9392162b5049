"""What the process group and the device can do, found by trying and not assumed from their names."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_osdp.profiler.live_tensors import LiveBytes
from lightning_osdp.profiler.step_time import fastest_s, synchronize

Collective = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes the whole tensor and this rank's shard."""

REPEATS = 5
_NUM_BYTES = 4 * 1024**2
_WIDTH = 2048
_COPIED_BYTES = 16 * 1024**2


def fastest_together_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs, after one to warm up, each as long as on its slowest rank.

    Ranks begin each run together, and it ends when the last of them is through. Call it on all ranks of the default
    process group; all get the same.

    Args:
        run: what each rank does.
        device: waited for.
    """
    runs_s = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        runs_s.append(time.perf_counter() - start)
    slowest_s = torch.tensor(runs_s[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return float(slowest_s.min().item())


def copies_in_reduce_scatter(device: torch.device, reduce_scatter: Collective) -> bool:
    """Whether a reduce-scatter holds a copy of what it reduces, as gloo's does. Call it on all ranks."""
    whole, shard = _tensors(device)
    if device.type == "cuda":
        reduce_scatter(whole, shard)  # the communicator's own buffers come with its first collective
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        reduce_scatter(whole, shard)
        synchronize(device)
        beside = torch.cuda.max_memory_allocated(device) - before
    else:
        with LiveBytes(device.type) as live:
            kept = live.track([whole, shard])
            reduce_scatter(whole, shard)
        beside = live.peak_bytes - kept
    copies = torch.tensor(int(beside >= whole.nbytes), device=device)
    dist.all_reduce(copies, op=dist.ReduceOp.MAX)
    return bool(copies.item())


def overlaps_computing(device: torch.device, all_gather: Collective) -> bool:
    """Whether computing goes on during an all-gather that is issued in a stream of its own. Call it on all ranks.

    Where a device has no streams, as the CPU, the host waits for each collective
    before it goes on: there is nothing to measure.
    """
    if device.type == "cpu":
        return False
    whole, shard = _tensors(device)
    matrix = torch.randn(_WIDTH, _WIDTH, device=device)
    stream = torch.cuda.Stream(device)

    def gather() -> None:
        with torch.cuda.stream(stream):
            all_gather(whole, shard)

    gather_s = fastest_together_s(gather, device)
    once_s = fastest_together_s(lambda: matrix @ matrix, device)
    num_repeats = max(1, round(gather_s / once_s))  # on every rank, as they have the same times

    def compute() -> None:
        for _ in range(num_repeats):
            matrix @ matrix

    def both() -> None:
        gather()
        compute()

    compute_s, both_s = fastest_together_s(compute, device), fastest_together_s(both, device)
    # half of the shorter one hidden
    return both_s <= max(gather_s, compute_s) + 0.5 * min(gather_s, compute_s)


def host_copy_s_per_byte(device: torch.device) -> float:
    """Seconds per byte of a copy from the device to host memory, as for offloading; on CPU of a copy in memory.

    Copies back are taken to be as fast.
    """
    there = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return fastest_s(lambda: here.copy_(there, non_blocking=True), device, repeats=REPEATS) / _COPIED_BYTES


def _tensors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    elements = _NUM_BYTES // 4 // dist.get_world_size()
    return torch.zeros(elements * dist.get_world_size(), device=device), torch.zeros(elements, device=device)
