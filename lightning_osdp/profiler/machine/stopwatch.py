"""Seconds on the device that trains: by the host's clock on CPU, between events in its stream on CUDA."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist

Mark: TypeAlias = float | torch.cuda.Event
"""Moment of the device: seconds of the host's clock, or an event in its stream."""

REPEATS_TOGETHER = 5
_LEAD, _MOST_LEAD_S = 2.0, 0.2
"""Wait of the device before a run, as a multiple of the host's seconds to issue the last run; and its most seconds."""
_CYCLES_PER_S = 2e9
"""Rate of a GPU's clock, which is 1.2 to 3 GHz; `_LEAD` allows for that."""


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that was issued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device) -> Mark:
    """Marks the present; on CUDA, the moment at which the device comes to this place of its current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between_s(start: Mark, end: Mark) -> float:
    """Seconds between two marks of one device, which the device has passed."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return float(start.elapsed_time(end)) / 1e3


def fastest_s(
    call: Callable[[], object], device: torch.device, *, repeats: int, num_calls: int = 1, budget_s: float = math.inf
) -> float:
    """Seconds of one call in the fastest of a few runs of ``num_calls``, after one call to warm up.

    On CUDA the seconds are the device's, see `_run_s`. Runs end once all together have taken longer than ``budget_s``.
    """

    def run() -> None:
        for _ in range(num_calls):
            call()

    start = time.perf_counter()
    _, issued_s = _run_s(call, device)
    best = math.inf
    for _ in range(repeats):
        run_s, issued_s = _run_s(run, device, behind_s=issued_s)
        best = min(best, run_s / num_calls)
        if time.perf_counter() - start > budget_s:
            break
    return best


def fastest_together_s(
    run: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = REPEATS_TOGETHER,
    is_busy_only: bool = False,
    is_warm: bool = False,
    is_ahead: bool = True,
) -> float:
    """Seconds of the fastest of a few runs, after one to warm up, each as long as on its slowest rank.

    Ranks begin each run together. On CUDA the seconds are the device's, see `_run_s`. All ranks of the default process
    group must call this function, and get the same number.

    Args:
        run: is timed.
        device: where it computes.
        repeats: runs that are timed.
        is_busy_only: counts the seconds for which this thread has a core, not those for which it waits; on CPU.
        is_warm: counts the first run, too: all that it does was done before; on CPU.
        is_ahead: has the device wait until the host has issued a run; on CUDA.
    """
    runs_s, issued_s = list[float](), 0.0
    for _ in range(repeats + 1):
        busy_s = time.thread_time()
        run_s, issued_s = _run_s(run, device, behind_s=issued_s if is_ahead else 0.0, is_together=True)
        runs_s.append(time.thread_time() - busy_s if is_busy_only else run_s)
    slowest_s = torch.tensor(runs_s[0 if is_warm else 1 :], dtype=torch.float64, device=device)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return float(slowest_s.min().item())


def _run_s(
    run: Callable[[], object], device: torch.device, *, behind_s: float = 0.0, is_together: bool = False
) -> tuple[float, float]:
    """Seconds of a run, and seconds that the host took to issue it.

    In a step the host is ahead: launching kernels and running hooks hides behind the device's computing. So on CUDA the
    device first waits until the host has issued the run, as far as that takes no longer than about ``behind_s``, which
    the last run took. Ranks that begin together meet in a collective there, not at a barrier, at which hosts would
    wait.
    """
    if device.type == "cuda":
        synchronize(device)
        with torch.cuda.device(device):
            torch.cuda._sleep(int(_CYCLES_PER_S * min(_LEAD * behind_s, _MOST_LEAD_S)))
        if is_together:
            dist.all_reduce(torch.zeros(1, device=device))
    elif is_together:
        dist.barrier()
    start, before = mark(device), time.perf_counter()
    run()
    issued_s = time.perf_counter() - before
    end = mark(device)
    synchronize(device)
    return between_s(start, end), issued_s
