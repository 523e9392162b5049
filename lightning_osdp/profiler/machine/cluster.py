"""alpha and beta of the collectives on the process group in use, and the memory that a rank may use."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
import torch.distributed as dist

from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.profiler.machine.backend import (
    Collective,
    copies_in_reduce_scatter,
    fastest_together_s,
    host_copy_s_per_byte,
    overlaps_computing,
)
from lightning_osdp.profiler.machine.memory import default_memory_limit_bytes
from lightning_osdp.profiler.machine.unit_overhead import measure_unit_overhead

_SIZES_BYTES = (16 * 1024, 256 * 1024, 2 * 1024**2, 8 * 1024**2)


def measure_cluster(device: torch.device, *, num_nodes: int = 1, local_ranks: int = 1) -> Cluster:
    """Links of the default process group and what the runtime takes for a unit, both timed. Call it on all ranks.

    Args:
        device: where the tensors are, as in training.
        num_nodes: machines that the ranks are spread over.
        local_ranks: ranks on this machine, which share its memory on CPU.

    Returns:
        The same values on every rank. With one rank, or no process group, links that cost nothing.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        free = Link(latency_s=0.0, seconds_per_byte=0.0)
        return Cluster(
            world_size=1,
            all_gather=free,
            reduce_scatter=free,
            num_nodes=num_nodes,
            host_copy_s_per_byte=host_copy_s_per_byte(device),
            memory_bytes=default_memory_limit_bytes(device, local_ranks=local_ranks),
        )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        cluster = Cluster(
            world_size=dist.get_world_size(),
            all_gather=_measure_link(device, _all_gather),
            reduce_scatter=_measure_link(device, _reduce_scatter),
            num_nodes=num_nodes,
            backend=dist.get_backend(),
            overlaps=overlaps_computing(device, _all_gather),
            reduce_scatter_copies=copies_in_reduce_scatter(device, _reduce_scatter),
        )
        unit_overhead = measure_unit_overhead(cluster, device)
    copy_s = torch.tensor(host_copy_s_per_byte(device), dtype=torch.float64, device=device)
    dist.all_reduce(copy_s, op=dist.ReduceOp.MAX)
    # Last, when the communicator has the buffers that it keeps.
    least = torch.tensor(default_memory_limit_bytes(device, local_ranks=local_ranks), device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return dataclasses.replace(
        cluster,
        unit_overhead=unit_overhead,
        host_copy_s_per_byte=float(copy_s.item()),
        memory_bytes=int(least.item()),
    )


def _all_gather(whole: torch.Tensor, shard: torch.Tensor) -> None:
    dist.all_gather_single(whole, shard)


def _reduce_scatter(whole: torch.Tensor, shard: torch.Tensor) -> None:
    dist.reduce_scatter_single(shard, whole)


def _measure_link(device: torch.device, collective: Collective) -> Link:
    points, world_size = [], dist.get_world_size()
    for num_bytes in _SIZES_BYTES:
        elements = num_bytes // 4 // world_size
        whole = torch.zeros(elements * world_size, device=device)
        shard = torch.zeros(elements, device=device)
        points.append((whole.numel() * 4, fastest_together_s(partial(collective, whole, shard), device)))
    return fit_link(points, world_size)


def fit_link(points: list[tuple[int, float]], world_size: int) -> Link:
    """Alpha and beta that fit measured times with the least relative error, and the largest error that is left.

    Args:
        points: (bytes of the whole tensor, seconds) of each size.
        world_size: N; ``seconds = (N-1) alpha + (N-1)/N bytes beta``, OSDP's equation 2.

    Example:
        >>> link = fit_link([(1000, 0.003 + 0.75 * 1000 * 1e-6), (9000, 0.003 + 0.75 * 9000 * 1e-6)], 4)
        >>> round(link.latency_s, 9), round(link.seconds_per_byte, 12)
        (0.001, 1e-06)
    """
    steps = world_size - 1
    # Weighted least squares of t = a x + b y with weights 1/t, by the normal equations of two unknowns.
    rows = [(steps / t, steps / world_size * num_bytes / t) for num_bytes, t in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab
    alpha, beta = (a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant
    if alpha < 0:
        alpha, beta = 0.0, b1 / bb
    elif beta < 0:
        alpha, beta = a1 / aa, 0.0
    error = max(abs(row[0] * alpha + row[1] * beta - 1) for row in rows)
    return Link(latency_s=alpha, seconds_per_byte=beta, fit_error=error)
