"""What links of a test-bed really do: seconds of an all-gather on the ranks that exist."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist


def time_all_gather(*, sizes_bytes: Sequence[int], num_runs: int = 5) -> list[float]:
    """Least seconds of an all-gather for each size. Call it on all ranks of the default process group.

    Args:
        sizes_bytes: of the whole, gathered tensor; rounded down to equal shards of float32.
        num_runs: of which the fastest counts, after one to warm up.
    """
    found = []
    for size in sizes_bytes:
        shard = torch.zeros(size // 4 // dist.get_world_size())
        whole = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(whole, shard)
        seconds = []
        for _ in range(num_runs):
            dist.barrier()
            start_s = time.perf_counter()
            dist.all_gather(whole, shard)
            seconds.append(time.perf_counter() - start_s)
        found.append(min(seconds))
    return found
