"""What the process group's backend does besides moving bytes: found by trying, not assumed from its name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_osdp.profiler.timing.fastest import fastest_s
from lightning_osdp.profiler.timing.step_time import synchronize
from lightning_osdp.profiler.tracing.live_bytes import LiveBytes

Collective = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes the whole tensor and this rank's shard."""

_NUM_BYTES = 4 * 1024**2
_WIDTH = 2048


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
    return _any(beside >= whole.nbytes, device)


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

    gather_s = fastest_s(gather, device)
    once_s = fastest_s(lambda: matrix @ matrix, device)
    num_repeats = max(1, round(gather_s / once_s))  # on every rank, as they have the same times

    def compute() -> None:
        for _ in range(num_repeats):
            matrix @ matrix

    def both() -> None:
        gather()
        compute()

    compute_s, both_s = fastest_s(compute, device), fastest_s(both, device)
    # half of the shorter one hidden
    return both_s <= max(gather_s, compute_s) + 0.5 * min(gather_s, compute_s)


def _tensors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    elements = _NUM_BYTES // 4 // dist.get_world_size()
    return torch.zeros(elements * dist.get_world_size(), device=device), torch.zeros(elements, device=device)


def _any(value: bool, device: torch.device) -> bool:
    """Whether it holds on any rank."""
    held = torch.tensor(int(value), device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return bool(held.item())
