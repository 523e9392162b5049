"""How long something takes that all ranks do at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_osdp.profiler.timing.step_time import synchronize

REPEATS = 5


def fastest_s(run: Callable[[], object], device: torch.device) -> float:
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
