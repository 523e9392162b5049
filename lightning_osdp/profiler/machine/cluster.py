"""What the process group, the device and the host can do, found by trying and not assumed from their names."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist

from lightning_osdp.core.cluster import Cluster, Contention, Link, Links
from lightning_osdp.profiler.live_tensors import LiveBytes
from lightning_osdp.profiler.machine.memory import default_memory_limit_bytes, library_workspace_bytes
from lightning_osdp.profiler.machine.stopwatch import REPEATS_TOGETHER, fastest_s, fastest_together_s, synchronize
from lightning_osdp.profiler.machine.unit_overhead import measure_unit_overhead

_SIZES_BYTES = tuple(4**exponent for exponent in range(7, 15))
"""Of collectives by which a link is measured: 16 KiB to 256 MiB, as far as there is time."""
_LEAST_SIZES, _PATIENCE_S = 4, 2.0
"""Sizes that are measured in any case, and seconds for one more."""
_MOST_IN_A_ROW, _LEAST_IN_A_ROW, _ROW_S = 10, 3, 0.1
"""Collectives that follow each other, as in a step; fewer where they take longer than this together, but on CUDA."""
_LEAST_OVERLAP_S, _OVERLAP_REPEATS = 5e-3, 5
"""What computing and all-gathers each take, at least, to tell whether they overlap; and how often that is tried."""
_MOST_CONTENTION = 0.9
"""Of what runs beside something longer, the share by which that takes longer; 1 were as if nothing was hidden."""
_NUM_BYTES = 4 * 1024**2
"""Of those that are looked at otherwise."""
_WIDTH = 2048
_COPIED_BYTES = 16 * 1024**2
_REPEATS = 5


def measure_cluster(
    device: torch.device, *, local_ranks: int = 1, model_bytes: int = 0, node_size: int | None = None
) -> Cluster:
    """Links of the default process group and what the runtime takes for a unit, both timed. Call it on all ranks.

    Args:
        device: where the tensors are, as in training.
        local_ranks: ranks on this machine, which share its memory on CPU.
        model_bytes: of the model that is on the device already: plans may use them.
        node_size: ranks of a node, which follow each other; links inside of nodes and between them are then timed, too.
            None: all are in one.

    Returns:
        The same values on every rank. With one rank, or no process group, links that cost nothing.
    """
    workspace_bytes = library_workspace_bytes(device)

    def limit_bytes() -> int:
        planned_bytes = model_bytes + workspace_bytes
        return default_memory_limit_bytes(device, local_ranks=local_ranks, planned_bytes=planned_bytes)

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        free = Link(latency_s=0.0, seconds_per_byte=0.0)
        return Cluster(
            world_size=1,
            all_gather=free,
            reduce_scatter=free,
            host_copy_s_per_byte=_host_copy_s_per_byte(device),
            host_copies_overlap=device.type == "cuda",
            library_workspace_bytes=workspace_bytes,
            memory_bytes=limit_bytes(),
        )
    with ExitStack() as groups, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        overlaps, contention = _measure_overlap(device)
        cluster = Cluster(
            world_size=dist.get_world_size(),
            all_gather=_measure_link(device, _all_gather),
            reduce_scatter=_measure_link(device, _reduce_scatter),
            backend=dist.get_backend(),
            overlaps=overlaps,
            contention=contention,
            reduce_scatter_copies=_copies_in_reduce_scatter(device),
            node_size=node_size,
        )
        unit_overhead = measure_unit_overhead(cluster, device)
        if cluster.has_nodes:
            cluster = _with_links_of_nodes(cluster, device, groups)
        return dataclasses.replace(
            cluster,
            unit_overhead=unit_overhead,
            host_copy_s_per_byte=_over_ranks(_host_copy_s_per_byte(device), dist.ReduceOp.MAX, device),
            host_copies_overlap=device.type == "cuda",
            library_workspace_bytes=int(_over_ranks(workspace_bytes, dist.ReduceOp.MAX, device)),
            # Last, when all communicators, those of nodes too, have the buffers that they keep.
            memory_bytes=int(_over_ranks(limit_bytes(), dist.ReduceOp.MIN, device)),
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


def _with_links_of_nodes(cluster: Cluster, device: torch.device, groups: ExitStack) -> Cluster:
    """The cluster with what is timed only where there are several nodes: inside of them, between them, all-reduces.

    Args:
        cluster: of nodes.
        device: where the ranks compute.
        groups: gets the process groups of nodes, which live as long as it is open.
    """
    assert cluster.node_size is not None
    ranks = range(cluster.world_size)
    nodes = [list(ranks[first : first + cluster.node_size]) for first in ranks[:: cluster.node_size]]
    peers = [list(ranks[place :: cluster.node_size]) for place in range(cluster.node_size)]
    node, other_nodes = (groups.enter_context(_own_of(parts)) for parts in (nodes, peers))
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

    def measured(num_bytes: int, in_a_row: int) -> tuple[int, float]:
        whole, shard = _whole_and_shard(num_bytes, device, group)

        def run() -> None:
            for _ in range(in_a_row):
                collective(whole, shard, group)

        return whole.nbytes, fastest_together_s(run, device) / in_a_row

    points = points_by(measured, least_in_a_row=_MOST_IN_A_ROW if device.type == "cuda" else _LEAST_IN_A_ROW)
    return link_through(points, dist.get_world_size(group))


def points_by(
    measured: Callable[[int, int], tuple[int, float]], *, least_in_a_row: int = _LEAST_IN_A_ROW
) -> list[tuple[int, float]]:
    """Bytes and seconds of one collective at `_SIZES_BYTES`, as far as there is time.

    Args:
        measured: takes about how many bytes a collective has and how many follow each other; returns its exact bytes
            and its seconds, the same on every rank.
        least_in_a_row: how many follow each other, however long that takes.
    """
    points: list[tuple[int, float]] = []
    for num_bytes in _SIZES_BYTES:
        expected_s = points[-1][1] * num_bytes / points[-1][0] if points else 0.0
        in_a_row = max(least_in_a_row, min(_MOST_IN_A_ROW, int(_ROW_S / max(expected_s, 1e-9))))
        if len(points) >= _LEAST_SIZES and (REPEATS_TOGETHER + 1) * in_a_row * expected_s > _PATIENCE_S:
            break
        points.append(measured(num_bytes, in_a_row))
    return points


def _whole_and_shard(num_bytes: int, device: torch.device, group: _Group = None) -> tuple[torch.Tensor, torch.Tensor]:
    """For collectives of about so many bytes."""
    world_size = dist.get_world_size(group)
    elements = num_bytes // 4 // world_size
    return torch.zeros(elements * world_size, device=device), torch.zeros(elements, device=device)


def link_through(points: Sequence[tuple[int, float]], world_size: int) -> Link:
    """The link that was measured; a size that took longer than a larger one counts as taking no longer than that.

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


def _measure_overlap(device: torch.device) -> tuple[bool, Contention]:
    """Whether computing goes on during an all-gather in a stream of its own, and how they slow each other down.

    Where a device has no streams, as the CPU, the host waits for each collective: there is nothing to measure. Call it
    on all ranks.
    """
    if device.type == "cpu":
        return False, Contention()
    whole, shard = _whole_and_shard(_NUM_BYTES, device)
    matrix = torch.randn(_WIDTH, _WIDTH, device=device)
    computing, gathering = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def measured(num_gathers: int, num_products: int) -> float:
        def run() -> None:
            gathering.wait_stream(computing)
            with torch.cuda.stream(gathering):
                for _ in range(num_gathers):
                    _all_gather(whole, shard)
            for _ in range(num_products):
                matrix @ matrix
            computing.wait_stream(gathering)

        return fastest_together_s(run, device)

    overlaps = hidden_share(measured) >= 0.5
    return overlaps, contention_of(measured) if overlaps else Contention()


def hidden_share(measured: Callable[[int, int], float]) -> float:
    """The share of the shorter one of computing and all-gathers that the other one hides; the median of several.

    Args:
        measured: seconds of so many all-gathers beside so many matrix products, the same on every rank. It is asked
            for as many as take `_LEAST_OVERLAP_S` at least, and products as long as all-gathers.

    Example:
        >>> hidden_share(lambda num_gathers, num_products: max(1e-3 * num_gathers, 2e-3 * num_products))
        1.0
    """
    num_gathers, gather_s = _long_enough(lambda number: measured(number, 0), _LEAST_OVERLAP_S)
    num_products, _ = _long_enough(lambda number: measured(0, number), max(_LEAST_OVERLAP_S, gather_s))
    return statistics.median(
        1 - more_s / min(gather_s, compute_s)
        for gather_s, compute_s, more_s in _beside(measured, num_gathers, num_products)
    )


def contention_of(measured: Callable[[int, int], float]) -> Contention:
    """How all-gathers and matrix products that run beside each other slow each other down.

    Let computing take a times as long beside collectives, and these c times. All-gathers of G seconds that outlast
    products of P take ``G + a P (1 - 1/c)`` with them, of which ``u = a (1 - 1/c)`` is measured; products that outlast
    all-gathers give ``v = c (1 - 1/a)``. So ``a / c = (1 - u) / (1 - v)``, ``a = u + a / c`` and ``c = v + c / a``.

    Args:
        measured: as for `hidden_share`. What is to outlast the other takes twice as long alone.

    Example:
        >>> contention_of(lambda num_gathers, num_products: 1e-3 * max(num_gathers, num_products))
        Contention(computing=1.0, collectives=1.0)
    """
    num_gathers, gather_s = _long_enough(lambda number: measured(number, 0), _LEAST_OVERLAP_S)
    num_products, compute_s = _long_enough(lambda number: measured(0, number), _LEAST_OVERLAP_S)
    more_gathers = max(num_gathers, math.ceil(2 * num_gathers * compute_s / gather_s))
    more_products = max(num_products, math.ceil(2 * num_products * gather_s / compute_s))
    of_gathers, of_computing = (
        min(_MOST_CONTENTION, max(0.0, statistics.median(shares)))
        for shares in (
            [more_s / compute_s for _, compute_s, more_s in _beside(measured, more_gathers, num_products)],
            [more_s / gather_s for gather_s, _, more_s in _beside(measured, num_gathers, more_products)],
        )
    )
    ratio = (1 - of_gathers) / (1 - of_computing)
    return Contention(computing=max(1.0, of_gathers + ratio), collectives=max(1.0, of_computing + 1 / ratio))


def _beside(
    measured: Callable[[int, int], float], num_gathers: int, num_products: int
) -> Iterator[tuple[float, float, float]]:
    """Seconds of all-gathers, of products, and by how much both together outlast the longer of them; several times."""
    for _ in range(_OVERLAP_REPEATS):
        gather_s, compute_s = measured(num_gathers, 0), measured(0, num_products)
        yield gather_s, compute_s, measured(num_gathers, num_products) - max(gather_s, compute_s)


def _long_enough(seconds_of: Callable[[int], float], least_s: float) -> tuple[int, float]:
    """A number that takes so long, and how long it takes."""
    number = 1
    while (taken_s := seconds_of(number)) < least_s:
        number *= 2
    return number, taken_s


def _host_copy_s_per_byte(device: torch.device) -> float:
    """Seconds per byte of a copy from the device to host memory, as for offloading; on CPU of a copy in memory.

    Copies back are taken to be as fast.
    """
    there = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return fastest_s(lambda: here.copy_(there, non_blocking=True), device, repeats=_REPEATS) / _COPIED_BYTES
