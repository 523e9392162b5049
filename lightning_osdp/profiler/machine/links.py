"""Links between ranks: how long collectives take, by their bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from lightning_osdp.core.cluster import Link
from lightning_osdp.operations.gloo import begin_all_to_all, is_by_gloo
from lightning_osdp.profiler.machine.stopwatch import REPEATS_TOGETHER, fastest_together_s

_SIZES_BYTES = tuple(4**exponent for exponent in range(7, 15))
"""Sizes of collectives by which a link is measured: 16 KiB to 256 MiB, as far as the model asks for and time allows."""
_LEAST_SIZES, _PATIENCE_S = 4, 0.45
"""Number of sizes that are measured in any case, and seconds for each of them; all larger ones share as many."""
_MOST_IN_A_ROW, _ROW_S, _LARGE_ROW_S = 10, 0.1, 0.03
"""Number of collectives that follow each other, as in a step, at most; and seconds for all of them, of small sizes and
of large ones, whose seconds a late rank adds less to."""
_LEAST_REPEATS, _LARGE_REPEATS = 2, 2
"""Rows of collectives of one size that are timed: of a small size at least, and of a large one at most."""
NUM_BYTES = 4 * 1024**2
"""Size of the collectives by which overlap and copies are found."""
WIDTH_ON_CPU = 256
"""Width of the matrices whose products run beside collectives on CPU."""
_PRODUCTS_BETWEEN = 4
"""Number of such products between two collectives on CPU, a few milliseconds."""

Group = dist.ProcessGroup | None
"""None: all ranks."""


def reduce_scatter(whole: torch.Tensor, shard: torch.Tensor, group: Group = None) -> None:
    """Reduce-scatters a tensor.

    On gloo it is its communication alone: to add up is computing, and a part of a unit's overhead.
    """
    if is_by_gloo(group, whole.device):
        begin_all_to_all(torch.empty_like(whole), whole, group).wait()
    else:
        dist.reduce_scatter_single(shard, whole, group=group)


def all_reduce(whole: torch.Tensor, _: torch.Tensor, group: Group = None) -> None:
    """All-reduces a tensor."""
    dist.all_reduce(whole, group=group)


def measure_link(
    device: torch.device, most_bytes: float, collective: Callable[..., object], group: Group = None
) -> Link:
    """Link of a process group, timed while the other groups that divide the ranks are timed, too.

    On CPU each collective follows computing, as in a step: ranks that share cores wait for one until the others have
    had theirs, which ranks that only communicate do not. The seconds of that computing alone are taken off.
    """
    num_products = _PRODUCTS_BETWEEN if device.type == "cpu" else 0
    matrix = torch.ones(WIDTH_ON_CPU, WIDTH_ON_CPU)

    def run_s(in_a_row: int, communicate: Callable[[], object], repeats: int = REPEATS_TOGETHER) -> float:
        def run() -> None:
            for _ in range(in_a_row):
                for _ in range(num_products):
                    matrix @ matrix
                communicate()

        return fastest_together_s(run, device, repeats=repeats) / in_a_row

    computing_s = run_s(_MOST_IN_A_ROW, lambda: None) if num_products else 0.0

    def measured(num_bytes: int, in_a_row: int, repeats: int) -> tuple[int, float]:
        nonlocal computing_s
        whole, shard = whole_and_shard(num_bytes, device, group)
        seconds = run_s(in_a_row, partial(collective, whole, shard, group), repeats)
        if seconds <= computing_s:  # which was timed in a slow episode
            computing_s = min(computing_s, run_s(_MOST_IN_A_ROW, lambda: None))
        return whole.nbytes, max(0.0, seconds - computing_s)

    least_in_a_row = _MOST_IN_A_ROW if device.type == "cuda" else 1
    points = points_by(measured, most_bytes=most_bytes, least_in_a_row=least_in_a_row)
    return link_through(points, dist.get_world_size(group))


def measure_agreement(hosts: Group) -> Link:
    """Link of all-to-alls of two numbers, in the fastest of a few runs on its slowest rank: latency alone."""
    num_ranks, runs_s = dist.get_world_size(hosts), list[float]()
    told = torch.zeros(2 * num_ranks, dtype=torch.int64, device="cpu")  # as `Agreement` reports
    reports = told.clone()
    for _ in range(REPEATS_TOGETHER):
        dist.all_to_all_single(reports, told, group=hosts)  # ranks begin together
        start = time.perf_counter()
        for _ in range(_MOST_IN_A_ROW):
            dist.all_to_all_single(reports, told, group=hosts)
        runs_s.append((time.perf_counter() - start) / _MOST_IN_A_ROW)
    slowest_s = torch.tensor(runs_s, dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX, group=hosts)
    return Link(latency_s=float(slowest_s.min()) / (num_ranks - 1), seconds_per_byte=0.0)


def points_by(
    measured: Callable[[int, int, int], tuple[int, float]], *, most_bytes: float = math.inf, least_in_a_row: int = 1
) -> list[tuple[int, float]]:
    """Bytes and seconds of one collective at `_SIZES_BYTES`, as far as the model asks for and time allows.

    Args:
        measured: takes the approximate bytes of a collective, how many follow each other in a row, and the number of
            rows that are timed after one to warm up; returns the exact bytes and the seconds of one, equal on every
            rank.
        most_bytes: the model's units are no larger: no size is measured beyond the first one that is.
        least_in_a_row: number of collectives that follow each other however long that takes.
    """
    points: list[tuple[int, float]] = []
    left_s = _PATIENCE_S
    for num_bytes in _SIZES_BYTES:
        is_large = len(points) >= _LEAST_SIZES
        if is_large and num_bytes >= 4 * most_bytes:
            break
        expected_s = max(1e-9, points[-1][1] * num_bytes / points[-1][0] if points else 0.0)
        row_s = _LARGE_ROW_S if is_large else _ROW_S
        in_a_row = max(least_in_a_row, min(_MOST_IN_A_ROW, int(row_s / expected_s)))
        repeats = int(left_s / (in_a_row * expected_s)) - 1
        if is_large and repeats < 1:
            break
        repeats = min(_LARGE_REPEATS, repeats) if is_large else max(_LEAST_REPEATS, min(REPEATS_TOGETHER, repeats))
        points.append(measured(num_bytes, in_a_row, repeats))
        if is_large:
            left_s -= (repeats + 1) * in_a_row * points[-1][1]
    return points


def whole_and_shard(num_bytes: int, device: torch.device, group: Group = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole tensor and shard for collectives of about ``num_bytes``."""
    world_size = dist.get_world_size(group)
    elements = num_bytes // 4 // world_size
    return torch.zeros(elements * world_size, device=device), torch.zeros(elements, device=device)


def link_through(points: Sequence[tuple[int, float]], world_size: int) -> Link:
    """Link through measured points; a size that took longer than a larger one counts with the larger one's seconds.

    Args:
        points: bytes of the whole tensor and seconds, at least two points, by size.
        world_size: N; a collective is N - 1 steps in which each rank sends 1/N of the bytes.

    Example:
        >>> link = link_through([(1000, 0.003), (9000, 0.009)], 4)
        >>> link.ring_s(5000, 4), link.latency_s
        (0.006, 0.001)
    """
    least_s = [min(seconds for _, seconds in points[index:]) for index in range(len(points))]
    steps = tuple(
        (size / world_size, least / (world_size - 1)) for (size, _), least in zip(points, least_s, strict=True)
    )
    (before_bytes, before_s), (last_bytes, last_s) = steps[-2:]
    return Link(latency_s=steps[0][1], seconds_per_byte=(last_s - before_s) / (last_bytes - before_bytes), steps=steps)
