"""Links and rates of the process group, the device and the host, measured and not assumed from their names."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist

from lightning_osdp.core.cluster import Cluster, Link, Links
from lightning_osdp.operations.gloo import all_gather
from lightning_osdp.profiler.live_tensors import LiveBytes
from lightning_osdp.profiler.machine.links import (
    NUM_BYTES,
    Group,
    all_reduce,
    measure_agreement,
    measure_link,
    reduce_scatter,
    whole_and_shard,
)
from lightning_osdp.profiler.machine.memory import (
    available_host_bytes,
    default_memory_limit_bytes,
    library_workspace_bytes,
)
from lightning_osdp.profiler.machine.overlap import measure_overlap, with_small_collectives
from lightning_osdp.profiler.machine.stopwatch import fastest_s, synchronize
from lightning_osdp.profiler.machine.unit_overhead import measure_call_s, measure_slice_s, measure_unit_overhead

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
        Equal values on every rank. With one rank, or no process group, links cost nothing; without one, nor do units.
    """
    workspace_bytes = library_workspace_bytes(device)
    with ExitStack() as groups, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        free = Link(latency_s=0.0, seconds_per_byte=0.0)
        cluster = Cluster(world_size=1, all_gather=free, reduce_scatter=free, has_streams=device.type != "cpu")
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            most_bytes = math.inf if parameter_bytes is None else parameter_bytes
            most_bytes = _over_ranks(most_bytes, dist.ReduceOp.MAX, device)  # all time the same sizes
            cluster = _measure_ranks(device, node_size, groups, hosts, most_bytes=most_bytes)
        elif dist.is_available() and dist.is_initialized():
            cluster = _with_overheads(cluster, device)
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
    device: torch.device, node_size: int | None, groups: ExitStack, hosts: Group, *, most_bytes: float = math.inf
) -> Cluster:
    """Cluster of all ranks, without host copies and memory; process groups of nodes live as long as ``groups``."""
    measured = partial(measure_link, device, most_bytes)
    gathers, reductions = measured(all_gather), measured(reduce_scatter)
    overlaps, waits_for, contention = measure_overlap(device, gathers, most_bytes)
    cluster = Cluster(
        world_size=dist.get_world_size(),
        all_gather=gathers,
        reduce_scatter=reductions,
        backend=dist.get_backend(),
        overlaps=overlaps,
        waits_for=waits_for,
        has_streams=device.type != "cpu",
        contention=contention,
        reduce_scatter_copies=_copies_in_reduce_scatter(device),
        node_size=node_size,
        agreement=measure_agreement(hosts) if hosts is not None or device.type == "cpu" else None,
    )
    cluster = _with_overheads(cluster, device, most_bytes=most_bytes)
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
        all_reduce=measured(all_reduce),
    )


def _with_overheads(cluster: Cluster, device: torch.device, *, most_bytes: float = math.inf) -> Cluster:
    """The cluster with what units, calls and slices take beside collectives, on one rank, too."""
    cluster = dataclasses.replace(cluster, call_s=measure_call_s(cluster, device), slice_s=measure_slice_s(device))
    cluster = dataclasses.replace(cluster, unit_overhead=measure_unit_overhead(cluster, device))
    return with_small_collectives(cluster, device, most_bytes)


def _over_ranks(value: float, operation: dist.ReduceOp.RedOpType, device: torch.device) -> float:
    reduced = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=operation)
    return float(reduced.item())


@contextmanager
def _group_of(parts: list[list[int]]) -> Iterator[dist.ProcessGroup]:
    """Process group of the ranks that are in one list with this rank; call it on all ranks."""
    group, _ = dist.new_subgroups_by_enumeration(parts)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _links(measured: Callable[[Callable[..., object]], Link]) -> Links:
    return Links(
        all_gather=measured(all_gather), reduce_scatter=measured(reduce_scatter), all_reduce=measured(all_reduce)
    )


def _copies_in_reduce_scatter(device: torch.device) -> bool:
    """Tells if a reduce-scatter holds a copy of its input, as gloo's does. Call it on all ranks."""
    whole, shard = whole_and_shard(NUM_BYTES, device)
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
    return bool(_over_ranks(beside >= whole.nbytes, dist.ReduceOp.MAX, device))


def _host_copy_s_per_byte(device: torch.device) -> float:
    """Seconds per byte of a copy from the device to host memory, as for offloading; on CPU of a copy in memory.

    Copies back are taken to be as fast.
    """
    there = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return fastest_s(lambda: here.copy_(there, non_blocking=True), device, repeats=_REPEATS) / _COPIED_BYTES
