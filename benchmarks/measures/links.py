"""Cases on links of a chosen rate, ranks that are joined by them, and what such links really do."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measures.section import Row
from benchmarks.testbed.local import local_ranks
from benchmarks.testbed.namespaces import Hosts, call, sent_bytes, why_unavailable

_log = logging.getLogger(__name__)


class _OnLinks(Protocol):
    @property
    def rate_mbit(self) -> float | None: ...


_CaseT = TypeVar("_CaseT", bound=_OnLinks)


def on_links_that_can_be_had(cases: Sequence[_CaseT]) -> list[_CaseT]:
    """Cases, each with a ``rate_mbit``, that can be measured on this machine; logs why where others are left out."""
    reason = why_unavailable() if any(case.rate_mbit is not None for case in cases) else None
    if reason is not None:
        _log.warning("Nothing is measured on shaped links: %s.", reason)
    return [case for case in cases if reason is None or case.rate_mbit is None]


def on_ranks(
    num_ranks: int, rate_mbit: float | None, function: str, *, ranks_per_host: int = 1, **arguments: Any
) -> Any:
    """Result of a function on rank 0 of so many, one thread each; plain processes where links are not shaped.

    Args:
        num_ranks: N.
        rate_mbit: 10^6 bit/s; None: not shaped.
        function: ``"package.module:function"``.
        ranks_per_host: that share a link, where links are shaped.
        **arguments: of the function, as JSON can write them.
    """
    if rate_mbit is None:
        return local_ranks(num_ranks).run(call, target=function, arguments=arguments)[0]
    with Hosts(num_ranks // ranks_per_host, rate_mbit=rate_mbit, ranks_per_host=ranks_per_host) as hosts:
        return hosts.run(function, arguments, timeout_s=3600)[0]


def rate_of(row: Row) -> str:
    """Rate of the links of a row's case, for people."""
    rate = row["case"]["rate_mbit"]
    return "not shaped" if rate is None else f"{rate:g} Mbit/s"


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


def time_all_reduces(*, node_size: int, num_bytes: int, num_runs: int = 3) -> dict[str, dict[str, float]]:
    """All-reduces among the ranks of each node, and between nodes, in all groups at a time. Call it on all ranks.

    Args:
        node_size: ranks of a node, which follow each other.
        num_bytes: of each rank.
        num_runs: of which the fastest counts, after one to warm up.

    Returns:
        ``within`` and ``between`` -> ``seconds`` until all are through, and ``sent_bytes`` that this node has sent to
        others meanwhile.
    """
    shape = (dist.get_world_size() // node_size, node_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("between", "within"))
    found = {}
    for name in ("within", "between"):
        tensor, runs = torch.zeros(num_bytes // 4), []
        for _ in range(1 + num_runs):
            dist.barrier()
            before, start_s = sent_bytes() or 0, time.perf_counter()
            dist.all_reduce(tensor, group=mesh.get_group(name))
            dist.barrier()  # other groups share the link
            runs.append((time.perf_counter() - start_s, (sent_bytes() or 0) - before))
        seconds, sent = zip(*runs[1:], strict=True)
        found[name] = {"seconds": min(seconds), "sent_bytes": min(sent)}
    return found
