"""Links and rates of the process group, the device and the host, measured and not assumed from their names."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist

from lightning_osdp.core.cluster import Cluster, Contention, Link, Links
from lightning_osdp.operations.reduce_scatter import is_by_gloo, scatter
from lightning_osdp.profiler.live_tensors import LiveBytes
from lightning_osdp.profiler.machine.memory import (
    available_host_bytes,
    default_memory_limit_bytes,
    library_workspace_bytes,
)
from lightning_osdp.profiler.machine.stopwatch import REPEATS_TOGETHER, fastest_s, fastest_together_s, synchronize
from lightning_osdp.profiler.machine.unit_overhead import measure_call_s, measure_slice_s, measure_unit_overhead

_SIZES_BYTES = tuple(4**exponent for exponent in range(7, 15))
"""Sizes of collectives by which a link is measured: 16 KiB to 256 MiB, as far as the model asks for and time allows."""
_LEAST_SIZES, _PATIENCE_S = 4, 0.45
"""Number of sizes that are measured in any case, and seconds for each of them; all larger ones share as many."""
_MOST_IN_A_ROW, _ROW_S, _LARGE_ROW_S = 10, 0.1, 0.03
"""Number of collectives that follow each other, as in a step, at most; and seconds for all of them, of small sizes and
of large ones, whose seconds a late rank adds less to."""
_LEAST_REPEATS, _LARGE_REPEATS = 2, 2
"""Rows of collectives of one size that are timed: of a small size at least, and of a large one at most."""
_LEAST_OVERLAP_S, _OVERLAP_REPEATS = 5e-3, 5
"""Least seconds of computing and of all-gathers that are run beside each other, and the number of such runs."""
_MOST_CONTENTION = 0.9
"""Most that a run is lengthened by a shorter one beside it, over the seconds of the shorter; 1: nothing is hidden."""
LEAST_HIDDEN = 0.25
"""Least share of a collective that computing hides, or the reverse, if they are to run beside each other in plans.

Contention says how much is lost between this and a whole; a higher threshold would have what is measured on either side
of it, as on two cores with four gloo ranks, plan for two machines that have little in common.
"""
_NUM_BYTES = 4 * 1024**2
"""Size of the collectives by which overlap and copies are found."""
_WIDTH, _WIDTH_ON_CPU = 2048, 256
"""Width of the matrices whose products run beside collectives."""
_PRODUCTS_BETWEEN = 4
"""Number of such products between two collectives on CPU, a few milliseconds."""
_COPIED_BYTES = 16 * 1024**2
_REPEATS = 5


def measure_cluster(
    device: torch.device,
    *,
    local_ranks: int = 1,
    model_bytes: int = 0,
    node_size: int | None = None,
    hosts: dist.ProcessGroup | None = None,
    parameter_bytes: int | None = None,
) -> Cluster:
    """Links of the default process group and overhead of units, both timed. Call it on all ranks.

    Args:
        device: device of the tensors, as in training.
        local_ranks: ranks on this machine, which share its memory on CPU.
        model_bytes: bytes of the model that is on the device already: plans may use them.
        node_size: ranks of a node, which follow each other; links inside of nodes and between them are then timed, too.
            None: all are in one.
        hosts: process group of all ranks for tensors of the CPU, by which they agree in a step; None: the default one,
            where the device is the CPU. Without any, that agreement is not timed.
        parameter_bytes: bytes of all parameters of the model, which no unit has more of: links are timed with
            collectives of about as many, if time allows. None: of any size.

    Returns:
        Equal values on every rank. With one rank, or no process group, links cost nothing.
    """
    workspace_bytes = library_workspace_bytes(device)
    with ExitStack() as groups, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            most_bytes = math.inf if parameter_bytes is None else parameter_bytes
            most_bytes = _over_ranks(most_bytes, dist.ReduceOp.MAX, device)  # all time the same sizes
            cluster = _measure_ranks(device, node_size, groups, hosts, most_bytes=most_bytes)
        else:
            free = Link(latency_s=0.0, seconds_per_byte=0.0)
            cluster = Cluster(world_size=1, all_gather=free, reduce_scatter=free)
        copy_s = _host_copy_s_per_byte(device)
        # last, when all communicators, those of nodes too, have the buffers that they keep
        limit_bytes = default_memory_limit_bytes(
            device, local_ranks=local_ranks, planned_bytes=model_bytes + workspace_bytes
        )
        host_bytes = available_host_bytes() // local_ranks
        if cluster.world_size > 1:
            host_bytes = int(_over_ranks(host_bytes, dist.ReduceOp.MIN, device))
            copy_s = _over_ranks(copy_s, dist.ReduceOp.MAX, device)
            workspace_bytes = int(_over_ranks(workspace_bytes, dist.ReduceOp.MAX, device))
            limit_bytes = int(_over_ranks(limit_bytes, dist.ReduceOp.MIN, device))
        return dataclasses.replace(
            cluster,
            host_copy_s_per_byte=copy_s,
            host_copies_overlap=device.type == "cuda",
            library_workspace_bytes=workspace_bytes,
            memory_bytes=limit_bytes,
            host_memory_bytes=host_bytes,
        )


def _measure_ranks(
    device: torch.device, node_size: int | None, groups: ExitStack, hosts: _Group, *, most_bytes: float = math.inf
) -> Cluster:
    """Cluster of all ranks, without host copies and memory; process groups of nodes live as long as ``groups``."""
    measured = partial(_measure_link, device, most_bytes)
    all_gather, reduce_scatter = measured(_all_gather), measured(_reduce_scatter)
    overlaps, waits_for, contention = _measure_overlap(device, all_gather)
    cluster = Cluster(
        world_size=dist.get_world_size(),
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
        backend=dist.get_backend(),
        overlaps=overlaps,
        waits_for=waits_for,
        has_streams=device.type != "cpu",
        contention=contention,
        reduce_scatter_copies=_copies_in_reduce_scatter(device),
        node_size=node_size,
        agreement=_measure_agreement(hosts) if hosts is not None or device.type == "cpu" else None,
    )
    cluster = dataclasses.replace(cluster, call_s=measure_call_s(cluster, device), slice_s=measure_slice_s(device))
    cluster = dataclasses.replace(cluster, unit_overhead=measure_unit_overhead(cluster, device))
    if node_size is None or not cluster.has_nodes:
        return cluster
    ranks = range(cluster.world_size)
    nodes = [list(ranks[first : first + node_size]) for first in ranks[::node_size]]
    peers = [list(ranks[place::node_size]) for place in range(node_size)]
    node, other_nodes = (groups.enter_context(_group_of(parts)) for parts in (nodes, peers))
    return dataclasses.replace(
        cluster,
        within_node=_links(partial(measured, group=node)),
        between_nodes=_links(partial(measured, group=other_nodes)),
        all_reduce=measured(_all_reduce),
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
    """On gloo its communication alone: to add up is computing, and a part of a unit's overhead."""
    if is_by_gloo(group, whole.device):
        scatter(torch.empty_like(whole), whole, group).wait()
    else:
        dist.reduce_scatter_single(shard, whole, group=group)


def _all_reduce(whole: torch.Tensor, _: torch.Tensor, group: _Group = None) -> None:
    dist.all_reduce(whole, group=group)


@contextmanager
def _group_of(parts: list[list[int]]) -> Iterator[dist.ProcessGroup]:
    """Process group of the ranks that are in one list with this rank; call it on all ranks."""
    group, _ = dist.new_subgroups_by_enumeration(parts)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _links(measured: Callable[[Callable[..., None]], Link]) -> Links:
    return Links(
        all_gather=measured(_all_gather), reduce_scatter=measured(_reduce_scatter), all_reduce=measured(_all_reduce)
    )


def _measure_link(
    device: torch.device, most_bytes: float, collective: Callable[..., None], group: _Group = None
) -> Link:
    """Link of a process group, timed while the other groups that divide the ranks are timed, too.

    On CPU each collective follows computing, as in a step: ranks that share cores wait for one until the others have
    had theirs, which ranks that only communicate do not. The seconds of that computing alone are taken off.
    """
    num_products = _PRODUCTS_BETWEEN if device.type == "cpu" else 0
    matrix = torch.ones(_WIDTH_ON_CPU, _WIDTH_ON_CPU)

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
        whole, shard = _whole_and_shard(num_bytes, device, group)
        seconds = run_s(in_a_row, partial(collective, whole, shard, group), repeats)
        if seconds <= computing_s:  # which was timed in a slow episode
            computing_s = min(computing_s, run_s(_MOST_IN_A_ROW, lambda: None))
        return whole.nbytes, max(0.0, seconds - computing_s)

    least_in_a_row = _MOST_IN_A_ROW if device.type == "cuda" else 1
    points = points_by(measured, most_bytes=most_bytes, least_in_a_row=least_in_a_row)
    return link_through(points, dist.get_world_size(group))


def _measure_agreement(hosts: _Group) -> Link:
    """Link of all-reduces of a number of each rank, in the fastest of a few runs on its slowest rank: latency alone."""
    numbers, runs_s = torch.zeros(dist.get_world_size(hosts), dtype=torch.int32, device="cpu"), list[float]()
    for _ in range(REPEATS_TOGETHER):
        dist.all_reduce(numbers, group=hosts)  # ranks begin together
        start = time.perf_counter()
        for _ in range(_MOST_IN_A_ROW):
            dist.all_reduce(numbers, group=hosts)
        runs_s.append((time.perf_counter() - start) / _MOST_IN_A_ROW)
    slowest_s = torch.tensor(runs_s, dtype=torch.float64, device="cpu")
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX, group=hosts)
    return Link(latency_s=float(slowest_s.min()) / (len(numbers) - 1), seconds_per_byte=0.0)


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


def _whole_and_shard(num_bytes: int, device: torch.device, group: _Group = None) -> tuple[torch.Tensor, torch.Tensor]:
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


def _copies_in_reduce_scatter(device: torch.device) -> bool:
    """Tells if a reduce-scatter holds a copy of its input, as gloo's does. Call it on all ranks."""
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


def _measure_overlap(device: torch.device, link: Link) -> tuple[bool, tuple[str, ...], Contention]:
    """Tells if computing goes on during collectives, kinds that the host waits for, and how both are slowed down.

    On CUDA an all-gather runs in another stream. On CPU asynchronous all-gathers and reduce-scatters are tried apart,
    and the mean of their contention is taken; the host waits for reductions of units that are sharded in the node.
    Call it on all ranks.
    """
    if device.type != "cpu":
        beside = _beside_on_cuda(device)
        overlaps = hidden_share(beside) >= LEAST_HIDDEN
        return overlaps, (), contention_of(beside) if overlaps else Contention()
    whole, shard = _whole_and_shard(_overlapped_bytes(link), device)
    gathers, reductions = (
        beside_products(partial(begin, whole, shard), device, width=_WIDTH_ON_CPU, repeats=1)
        for begin in (_begin_all_gather, begin_reduce_scatter)
    )
    tried = {"gather": gathers, "gather_in_node": gathers, "reduce": reductions}
    hidden = {beside: hidden_share(beside) >= LEAST_HIDDEN for beside in (gathers, reductions)}
    if not any(hidden.values()):
        return False, (), Contention()
    waits_for = [kind for kind, beside in tried.items() if not hidden[beside]]
    found = [contention_of(beside) for beside, is_hidden in hidden.items() if is_hidden]
    contention = Contention(
        computing=statistics.fmean(each.computing for each in found),
        collectives=statistics.fmean(each.collectives for each in found),
    )
    return True, (*waits_for, "reduce_in_node", "scatter_in_node", "all_reduce"), contention


def _overlapped_bytes(link: Link) -> int:
    """Bytes of a collective, of those that were timed, that takes about as long as the computing tried beside it."""
    fitting = (size for size, seconds in link.steps if (dist.get_world_size() - 1) * seconds <= 4 * _LEAST_OVERLAP_S)
    return int(dist.get_world_size() * max(fitting, default=link.steps[0][0]))


def _begin_all_gather(whole: torch.Tensor, shard: torch.Tensor) -> dist.Work:
    work: dist.Work = dist.all_gather_single(whole, shard, async_op=True)
    return work


def begin_reduce_scatter(whole: torch.Tensor, shard: torch.Tensor) -> dist.Work:
    """Begins a reduce-scatter of a whole tensor; gloo's is into another than ``shard``."""
    if is_by_gloo(None, whole.device):
        return scatter(torch.empty_like(whole), whole)
    work: dist.Work = dist.reduce_scatter_single(shard, whole, async_op=True)
    return work


def beside_products(
    begin: Callable[[], dist.Work], device: torch.device, *, width: int, repeats: int = REPEATS_TOGETHER
) -> Callable[[int, int], float]:
    """Seconds of so many collectives beside so many products of square matrices, as `hidden_share` asks for.

    On CPU the first run counts, too: both were run before, but for the first time of all.
    """
    matrix = torch.randn(width, width, device=device)

    def run(num_collectives: int, num_products: int) -> None:
        works = [begin() for _ in range(num_collectives)]
        for _ in range(num_products):
            matrix @ matrix
        for work in works:
            work.wait()

    is_warm = device.type == "cpu"
    return lambda *numbers: fastest_together_s(partial(run, *numbers), device, repeats=repeats, is_warm=is_warm)


def _beside_on_cuda(device: torch.device) -> Callable[[int, int], float]:
    """Seconds of so many all-gathers, in a stream of their own, beside so many matrix products."""
    whole, shard = _whole_and_shard(_NUM_BYTES, device)
    matrix = torch.randn(_WIDTH, _WIDTH, device=device)
    computing, gathering = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def run(num_gathers: int, num_products: int) -> None:
        gathering.wait_stream(computing)
        with torch.cuda.stream(gathering):
            for _ in range(num_gathers):
                _all_gather(whole, shard)
        for _ in range(num_products):
            matrix @ matrix
        computing.wait_stream(gathering)

    return lambda *numbers: fastest_together_s(partial(run, *numbers), device)


def hidden_share(measured: Callable[[int, int], float]) -> float:
    """Share of the shorter of computing and all-gathers that the other one hides; the median of several runs.

    Args:
        measured: takes numbers of all-gathers and of matrix products beside them; returns their seconds, equal on every
            rank. All-gathers take at least `_LEAST_OVERLAP_S`, and products as long as all-gathers.

    Example:
        >>> hidden_share(lambda num_gathers, num_products: max(1e-3 * num_gathers, 2e-3 * num_products))
        1.0
    """
    num_gathers, gather_s = _calibrated(lambda number: measured(number, 0), _LEAST_OVERLAP_S)
    num_products, _ = _calibrated(lambda number: measured(0, number), max(_LEAST_OVERLAP_S, gather_s))
    return statistics.median(
        1 - more_s / min(gather_s, compute_s)
        for gather_s, compute_s, more_s in _paired_runs(measured, num_gathers, num_products)
    )


def contention_of(measured: Callable[[int, int], float]) -> Contention:
    """Slowdown of all-gathers and matrix products that run beside each other.

    Let computing take a times as long beside collectives, and collectives c times. All-gathers of G seconds that
    outlast products of P take ``G + a P (1 - 1/c)`` with them, of which ``u = a (1 - 1/c)`` is measured; products that
    outlast all-gathers give ``v = c (1 - 1/a)``. So ``a / c = (1 - u) / (1 - v)``, ``a = u + a / c`` and
    ``c = v + c / a``.

    Args:
        measured: as for `hidden_share`. The side that is to outlast the other takes twice as long alone.

    Example:
        >>> contention_of(lambda num_gathers, num_products: 1e-3 * max(num_gathers, num_products))
        Contention(computing=1.0, collectives=1.0)
    """
    num_gathers, gather_s = _calibrated(lambda number: measured(number, 0), _LEAST_OVERLAP_S)
    num_products, compute_s = _calibrated(lambda number: measured(0, number), _LEAST_OVERLAP_S)
    more_gathers = max(num_gathers, math.ceil(2 * num_gathers * compute_s / gather_s))
    more_products = max(num_products, math.ceil(2 * num_products * gather_s / compute_s))
    of_gathers, of_computing = (
        min(_MOST_CONTENTION, max(0.0, statistics.median(shares)))
        for shares in (
            [more_s / compute_s for _, compute_s, more_s in _paired_runs(measured, more_gathers, num_products)],
            [more_s / gather_s for gather_s, _, more_s in _paired_runs(measured, num_gathers, more_products)],
        )
    )
    ratio = (1 - of_gathers) / (1 - of_computing)
    return Contention(computing=max(1.0, of_gathers + ratio), collectives=max(1.0, of_computing + 1 / ratio))


def _paired_runs(
    measured: Callable[[int, int], float], num_gathers: int, num_products: int
) -> Iterator[tuple[float, float, float]]:
    """Seconds of all-gathers, of products, and of both together beyond the longer of the two; several times."""
    for _ in range(_OVERLAP_REPEATS):
        gather_s, compute_s = measured(num_gathers, 0), measured(0, num_products)
        yield gather_s, compute_s, measured(num_gathers, num_products) - max(gather_s, compute_s)


def _calibrated(seconds_of: Callable[[int], float], least_s: float) -> tuple[int, float]:
    """Least power of two that takes ``least_s``, and its seconds."""
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
