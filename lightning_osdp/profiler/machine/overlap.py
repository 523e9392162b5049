"""Overlap: how far computing and collectives hide each other, and how far they slow each other down."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from lightning_osdp.core.cluster import Cluster, Contention, Link
from lightning_osdp.operations.gloo import all_gather, begin_all_to_all, is_by_gloo
from lightning_osdp.profiler.machine.links import NUM_BYTES, WIDTH_ON_CPU, whole_and_shard
from lightning_osdp.profiler.machine.stopwatch import REPEATS_TOGETHER, fastest_together_s

_LEAST_OVERLAP_S, _OVERLAP_REPEATS = 5e-3, 5
"""Least seconds of computing and of all-gathers that are run beside each other, and the number of such runs."""
_LEAST_REPEATS, _OVERLAP_BUDGET_S = 3, 0.3
"""Runs that there are in any case, and seconds of all after which there are no more of them."""
_MOST_OVERLAP_S, _NUM_UNITS = 0.05, 4
"""Most seconds of a collective that is run beside computing on CPU, and number of units that such collectives are for:
the largest of a model tell contention from the delay of each, see `with_small_collectives`."""
ONE_BY_ONE = 8
"""Small collectives that are begun one by one beside computing."""
_SMALL_REPEATS = 20
"""Runs of a small collective beside computing, whose seconds scatter by as much as it takes."""
_MOST_CONTENTION = 0.9
"""Most that a run is lengthened by a shorter one beside it, over the seconds of the shorter; 1: nothing is hidden."""
LEAST_HIDDEN = 0.25
"""Least share of a collective that computing hides, or the reverse, if they are to run beside each other in plans.

Contention says how much is lost between this and a whole; a higher threshold would have what is measured on either side
of it, as on two cores with four gloo ranks, plan for two machines that have little in common.
"""
_WIDTH = 2048
"""Width of the matrices whose products run beside all-gathers on CUDA."""


def measure_overlap(
    device: torch.device, link: Link, most_bytes: float = math.inf
) -> tuple[bool, tuple[str, ...], Contention]:
    """Tells if computing goes on during collectives, kinds that the host waits for, and how both are slowed down.

    On CUDA an all-gather runs in another stream. On CPU asynchronous all-gathers, reduce-scatters and all-reduces are
    tried apart, and the mean of their contention is taken. The host waits for reduce-scatters of units that are sharded
    in the node. Call it on all ranks.

    Args:
        device: that computes.
        link: of all-gathers.
        most_bytes: bytes of all parameters of the model, whose units are a part of that.
    """
    if device.type != "cpu":
        beside = _beside_on_cuda(device)
        overlaps = hidden_share(beside) >= LEAST_HIDDEN
        return overlaps, (), contention_of(beside) if overlaps else Contention()
    whole, shard = whole_and_shard(_overlapped_bytes(link, most_bytes), device)
    tried = {
        kinds: beside_products(partial(begin, whole, shard), device, width=WIDTH_ON_CPU, repeats=1)
        for kinds, begin in {
            ("gather", "gather_in_node"): _begin_all_gather,
            ("reduce",): begin_reduce_scatter,
            ("reduce_whole", "all_reduce"): _begin_all_reduce,
        }.items()
    }
    hidden = {kinds: beside for kinds, beside in tried.items() if hidden_share(beside) >= LEAST_HIDDEN}
    if not hidden:
        return False, (), Contention()
    waits_for = [kind for kinds in tried if kinds not in hidden for kind in kinds]
    found = [*map(contention_of, hidden.values())]
    contention = Contention(
        computing=statistics.fmean(each.computing for each in found),
        collectives=statistics.fmean(each.collectives for each in found),
    )
    return True, (*waits_for, "reduce_in_node", "scatter_in_node"), contention


def with_small_collectives(cluster: Cluster, device: torch.device, most_bytes: float = math.inf) -> Cluster:
    """The cluster with what a small collective takes beside computing, beyond contention; call it on all ranks.

    Contention is that of large ones, which send for most of their time. On CPU threads of the backend and the kernel
    need a core for each message, too, however small: computing goes on later, in `Cluster.unit_overhead`, and where
    ranks have to share cores, collectives end later, in `Contention.delay_s`. Beside computing a small one of s seconds
    takes ``b = c s + d``, and a large one of g seconds ``c' g = c g + d``, where c' is the factor that was measured:
    ``d = (b - c' s) / (1 - s/g)`` and ``c = c' - d/g``. Nothing on other devices, and of collectives that the host
    waits for.

    Args:
        cluster: with contention that `measure_overlap` has found.
        device: that computes.
        most_bytes: as of `measure_overlap`.
    """
    if device.type != "cpu" or not (cluster.overlaps and cluster.all_gather.steps):
        return cluster
    ways = {"gather": (_begin_all_gather, cluster.all_gather), "reduce": (begin_reduce_scatter, cluster.reduce_scatter)}
    contention, overhead, delays_s = cluster.contention, dict(cluster.unit_overhead), list[float]()
    large_s = cluster.all_gather.ring_s(_overlapped_bytes(cluster.all_gather, most_bytes), cluster.world_size)
    for part, (begin, link) in ways.items():
        if part in cluster.waits_for:
            continue
        whole, shard = whole_and_shard(cluster.world_size * int(link.steps[0][0]), device)
        alone_s = link.ring_s(whole.nbytes, cluster.world_size)
        beside_s = _beside_s(partial(begin, whole, shard), device)
        if alone_s < large_s:
            delays_s.append(max(0.0, beside_s - alone_s * contention.collectives) / (1 - alone_s / large_s))
        of_one_s = taken_s(_one_by_one(partial(begin, whole, shard), device), beside_s, contention)
        overhead[part] = replace(overhead[part], fixed_s=overhead[part].fixed_s + of_one_s)
    delay_s = statistics.fmean(delays_s or [0.0])
    factor = max(1.0, contention.collectives - delay_s / large_s)
    return replace(cluster, unit_overhead=overhead, contention=replace(contention, collectives=factor, delay_s=delay_s))


def _beside_s(begin: Callable[[], dist.Work], device: torch.device) -> float:
    """Seconds from the begin of a small collective to its end while all ranks compute: the mean of runs, and ranks."""
    matrix, start_s = torch.randn(WIDTH_ON_CPU, WIDTH_ON_CPU, device=device), time.perf_counter()
    for _ in range(_SMALL_REPEATS):
        work = begin()
        while not work.is_completed():
            matrix @ matrix
        work.wait()
    mean_s = torch.tensor((time.perf_counter() - start_s) / _SMALL_REPEATS, dtype=torch.float64)
    dist.all_reduce(mean_s)
    return float(mean_s.item()) / dist.get_world_size()


def taken_s(measured: Callable[[int, int], float], beside_s: float, contention: Contention) -> float:
    """Seconds of computing that each collective takes beside it, beyond contention.

    A collective of g seconds beside computing explains ``g (1 - 1/a)`` of what takes longer, with a as in
    `contention_of`.

    Args:
        measured: takes the number of collectives, `ONE_BY_ONE` or 0, and that of matrix products beside each of them;
            returns their seconds, equal on every rank. There are products for twice as long as a collective takes.
        beside_s: seconds of a collective beside computing.
        contention: of large collectives.

    Example:
        >>> taken_s(lambda number, products: 1e-3 * (8 * products or number) + 5e-4 * number, 1.5e-3, Contention())
        0.0005
    """
    num_products = math.ceil(2 * beside_s * ONE_BY_ONE / measured(0, 1))
    runs = [(measured(ONE_BY_ONE, num_products), measured(0, num_products)) for _ in range(_LEAST_REPEATS)]
    more_s = statistics.median(both_s - compute_s for both_s, compute_s in runs) / ONE_BY_ONE
    return max(0.0, more_s - beside_s * (1 - 1 / contention.computing))


def _one_by_one(begin: Callable[[], dist.Work], device: torch.device) -> Callable[[int, int], float]:
    """Seconds of collectives that are each begun before so many products and waited for behind the next ones.

    Without collectives, of as many products.
    """
    matrix = torch.randn(WIDTH_ON_CPU, WIDTH_ON_CPU, device=device)

    def run(num_collectives: int, num_products: int) -> None:
        before: dist.Work | None = None
        for _ in range(ONE_BY_ONE):
            work = begin() if num_collectives else None
            for _ in range(num_products):
                matrix @ matrix
            if before is not None:
                before.wait()
            before = work
        if before is not None:
            before.wait()

    return lambda *given: fastest_together_s(partial(run, *given), device, repeats=1, is_warm=True)


def _overlapped_bytes(link: Link, most_bytes: float) -> int:
    """Bytes of a collective, of those that were timed, like those of units of the model, as far as time allows."""
    num_ranks = dist.get_world_size()
    fitting = (
        size
        for size, seconds in link.steps
        if (num_ranks - 1) * seconds <= _MOST_OVERLAP_S and _NUM_UNITS * num_ranks * size <= most_bytes
    )
    return int(num_ranks * max(fitting, default=link.steps[0][0]))


def _begin_all_gather(whole: torch.Tensor, shard: torch.Tensor) -> dist.Work:
    work = all_gather(whole, shard, async_op=True)
    assert work is not None
    return work


def begin_reduce_scatter(whole: torch.Tensor, shard: torch.Tensor) -> dist.Work:
    """Begins a reduce-scatter of a whole tensor; gloo's is into another than ``shard``."""
    if is_by_gloo(None, whole.device):
        return begin_all_to_all(torch.empty_like(whole), whole)
    work: dist.Work = dist.reduce_scatter_single(shard, whole, async_op=True)
    return work


def _begin_all_reduce(whole: torch.Tensor, _: torch.Tensor) -> dist.Work:
    """Begins an all-reduce that sends as many bytes as an all-gather of the whole tensor."""
    work: dist.Work = dist.all_reduce(whole[: whole.numel() // 2], async_op=True)
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
    whole, shard = whole_and_shard(NUM_BYTES, device)
    matrix = torch.randn(_WIDTH, _WIDTH, device=device)
    computing, gathering = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def run(num_gathers: int, num_products: int) -> None:
        gathering.wait_stream(computing)
        with torch.cuda.stream(gathering):
            for _ in range(num_gathers):
                all_gather(whole, shard)
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
    (num_gathers, _), (num_products, _) = _calibrated_pair(measured)
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
        measured: as for `hidden_share`. The side that is to outlast the other takes twice as long alone. Neither is
            much shorter than a collective, whose seconds scatter by more than short products are lengthened.

    Example:
        >>> contention_of(lambda num_gathers, num_products: 1e-3 * max(num_gathers, num_products))
        Contention(computing=1.0, collectives=1.0, delay_s=0.0)
    """
    (num_gathers, gather_s), (num_products, compute_s) = _calibrated_pair(measured)
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
    taken_s = 0.0
    for repeat in range(_OVERLAP_REPEATS):
        if repeat >= _LEAST_REPEATS and taken_s > _OVERLAP_BUDGET_S:
            return
        gather_s, compute_s = measured(num_gathers, 0), measured(0, num_products)
        both_s = measured(num_gathers, num_products)
        taken_s += gather_s + compute_s + both_s
        yield gather_s, compute_s, both_s - max(gather_s, compute_s)


def _calibrated_pair(measured: Callable[[int, int], float]) -> tuple[tuple[int, float], tuple[int, float]]:
    """Number of collectives, and of products that take about as long, each with its seconds alone."""
    num_gathers, gather_s = _calibrated(lambda number: measured(number, 0), _LEAST_OVERLAP_S)
    least_s = max(_LEAST_OVERLAP_S, gather_s)
    num_products, compute_s = _calibrated(lambda number: measured(0, number), least_s)
    as_long = math.ceil(num_products * least_s / compute_s)
    return (num_gathers, gather_s), (as_long, compute_s * as_long / num_products)


def _calibrated(seconds_of: Callable[[int], float], least_s: float) -> tuple[int, float]:
    """Least power of two that takes ``least_s``, and its seconds."""
    number = 1
    while (taken_s := seconds_of(number)) < least_s:
        number *= 2
    return number, taken_s
