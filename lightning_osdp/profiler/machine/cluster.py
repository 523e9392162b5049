"""What the process group, the device and the host can do, found by trying and not assumed from their names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_osdp.core.cluster import Cluster, Link, Links
from lightning_osdp.profiler.live_tensors import LiveBytes
from lightning_osdp.profiler.machine.memory import default_memory_limit_bytes
from lightning_osdp.profiler.machine.unit_overhead import measure_unit_overhead
from lightning_osdp.profiler.step_time import REPEATS_TOGETHER, fastest_s, fastest_together_s, synchronize

_SIZES_BYTES = tuple(4**exponent for exponent in range(7, 15))
"""Of collectives by which a link is measured: 16 KiB to 256 MiB, as far as there is time."""
_LEAST_SIZES, _PATIENCE_S = 4, 2.0
"""Sizes that are measured in any case, and seconds for one more."""
_MOST_IN_A_ROW, _LEAST_IN_A_ROW, _ROW_S = 10, 3, 0.1
"""Collectives that follow each other, as in a step; fewer where they take longer than this together."""
_NUM_BYTES = 4 * 1024**2
"""Of those that are looked at otherwise."""
_WIDTH = 2048
_COPIED_BYTES = 16 * 1024**2
_REPEATS = 5


def measure_cluster(device: torch.device, *, local_ranks: int = 1, node_size: int | None = None) -> Cluster:
    """Links of the default process group and what the runtime takes for a unit, both timed. Call it on all ranks.

    Args:
        device: where the tensors are, as in training.
        local_ranks: ranks on this machine, which share its memory on CPU.
        node_size: ranks of a node, which follow each other; links inside of nodes and between them are then timed, too.
            None: all are in one.

    Returns:
        The same values on every rank. With one rank, or no process group, links that cost nothing.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        free = Link(latency_s=0.0, seconds_per_byte=0.0)
        return Cluster(
            world_size=1,
            all_gather=free,
            reduce_scatter=free,
            host_copy_s_per_byte=_host_copy_s_per_byte(device),
            memory_bytes=default_memory_limit_bytes(device, local_ranks=local_ranks),
        )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        cluster = Cluster(
            world_size=dist.get_world_size(),
            all_gather=_measure_link(device, _all_gather),
            reduce_scatter=_measure_link(device, _reduce_scatter),
            backend=dist.get_backend(),
            overlaps=_overlaps_computing(device),
            reduce_scatter_copies=_copies_in_reduce_scatter(device),
            node_size=node_size,
        )
        unit_overhead = measure_unit_overhead(cluster, device)
        if cluster.has_nodes:
            cluster = _with_links_of_nodes(cluster, device)
    return dataclasses.replace(
        cluster,
        unit_overhead=unit_overhead,
        host_copy_s_per_byte=_over_ranks(_host_copy_s_per_byte(device), dist.ReduceOp.MAX, device),
        # Last, when the communicator has the buffers that it keeps.
        memory_bytes=int(
            _over_ranks(default_memory_limit_bytes(device, local_ranks=local_ranks), dist.ReduceOp.MIN, device)
        ),
    )


def _over_ranks(value: float, operation: dist.ReduceOp.RedOpType, device: torch.device) -> float:
    reduced = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=operation)
    return float(reduced.item())


_Group = dist.ProcessGroup | None
"""None: all ranks."""


def _all_gather(whole: torch.Tensor, shard: torch.Tensor, group: _Group = None) -> None:
    dist.all_gather_single(whole, shard, group=group)


def _reduce_scatter(whole: torch.Tensor, shard: torch.Tensor, group: _Group = None) -> None:
    dist.reduce_scatter_single(shard, whole, group=group)


def _all_reduce(whole: torch.Tensor, _: torch.Tensor, group: _Group = None) -> None:
    dist.all_reduce(whole, group=group)


def _with_links_of_nodes(cluster: Cluster, device: torch.device) -> Cluster:
    """The cluster with what is timed only where there are several nodes: inside of them, between them, all-reduces."""
    assert cluster.node_size is not None
    ranks = range(cluster.world_size)
    nodes = [list(ranks[first : first + cluster.node_size]) for first in ranks[:: cluster.node_size]]
    peers = [list(ranks[place :: cluster.node_size]) for place in range(cluster.node_size)]
    with _own_of(nodes) as node, _own_of(peers) as other_nodes:
        return dataclasses.replace(
            cluster,
            within_node=_measure_links(device, node),
            between_nodes=_measure_links(device, other_nodes),
            all_reduce=_measure_link(device, _all_reduce),
        )


@contextmanager
def _own_of(parts: list[list[int]]) -> Iterator[dist.ProcessGroup]:
    """A process group of those ranks that are in one of these lists with this rank; call it on all of them."""
    own, _ = dist.new_subgroups_by_enumeration(parts)
    try:
        yield own
    finally:
        dist.destroy_process_group(own)


def _measure_links(device: torch.device, group: dist.ProcessGroup) -> Links:
    return Links(
        all_gather=_measure_link(device, _all_gather, group),
        reduce_scatter=_measure_link(device, _reduce_scatter, group),
        all_reduce=_measure_link(device, _all_reduce, group),
    )


def _measure_link(device: torch.device, collective: Callable[..., None], group: _Group = None) -> Link:
    """Of a process group, at the same time as the others that divide the ranks."""
    points: list[tuple[int, float]] = []
    for num_bytes in _SIZES_BYTES:
        expected_s = points[-1][1] * num_bytes / points[-1][0] if points else 0.0
        in_a_row = max(_LEAST_IN_A_ROW, min(_MOST_IN_A_ROW, int(_ROW_S / max(expected_s, 1e-9))))
        if len(points) >= _LEAST_SIZES and (REPEATS_TOGETHER + 1) * in_a_row * expected_s > _PATIENCE_S:
            break
        whole, shard = _whole_and_shard(num_bytes, device, group)

        def run(whole: torch.Tensor = whole, shard: torch.Tensor = shard, number: int = in_a_row) -> None:
            for _ in range(number):
                collective(whole, shard, group)

        points.append((whole.nbytes, fastest_together_s(run, device) / in_a_row))
    return link_through(points, dist.get_world_size(group))


def _whole_and_shard(num_bytes: int, device: torch.device, group: _Group = None) -> tuple[torch.Tensor, torch.Tensor]:
    """For collectives of about so many bytes."""
    world_size = dist.get_world_size(group)
    elements = num_bytes // 4 // world_size
    return torch.zeros(elements * world_size, device=device), torch.zeros(elements, device=device)


def link_through(points: Sequence[tuple[int, float]], world_size: int) -> Link:
    """The link whose collectives take what was measured; what took longer than more bytes did, no longer than these.

    Args:
        points: bytes of the whole tensor and seconds, at least two, by size.
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


def _copies_in_reduce_scatter(device: torch.device) -> bool:
    """Whether a reduce-scatter holds a copy of what it reduces, as gloo's does. Call it on all ranks."""
    whole, shard = _whole_and_shard(_NUM_BYTES, device)
    if device.type == "cuda":
        _reduce_scatter(whole, shard)  # the communicator's own buffers come with its first collective
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _reduce_scatter(whole, shard)
        synchronize(device)
        beside = torch.cuda.max_memory_allocated(device) - before
    else:
        with LiveBytes(device.type) as live:
            kept = live.track([whole, shard])
            _reduce_scatter(whole, shard)
        beside = live.peak_bytes - kept
    return bool(_over_ranks(beside >= whole.nbytes, dist.ReduceOp.MAX, device))


def _overlaps_computing(device: torch.device) -> bool:
    """Whether computing goes on during an all-gather that is issued in a stream of its own. Call it on all ranks.

    Where a device has no streams, as the CPU, the host waits for each collective: there is nothing to measure.
    """
    if device.type == "cpu":
        return False
    whole, shard = _whole_and_shard(_NUM_BYTES, device)
    matrix = torch.randn(_WIDTH, _WIDTH, device=device)
    stream = torch.cuda.Stream(device)

    def gather() -> None:
        with torch.cuda.stream(stream):
            _all_gather(whole, shard)

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


def _host_copy_s_per_byte(device: torch.device) -> float:
    """Seconds per byte of a copy from the device to host memory, as for offloading; on CPU of a copy in memory.

    Copies back are taken to be as fast.
    """
    there = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return fastest_s(lambda: here.copy_(there, non_blocking=True), device, repeats=_REPEATS) / _COPIED_BYTES
