"""Collectives of OSDP on gloo beside gloo's own: each follows computing, as in a step, and is waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks.measures.links import on_links_that_can_be_had, on_ranks, rate_of
from benchmarks.measures.section import Row, Section
from lightning_osdp.operations.gloo import all_gather, begin_all_to_all

_SHARDS_BYTES = tuple(4**exponent * 2**10 for exponent in range(2, 7))
"""Bytes that each rank sends to each other one: 16 KiB to 4 MiB."""
_IN_A_ROW, _WIDTH, _PRODUCTS = 5, 256, 4
"""Collectives in a row, and the matrix products before each: a few milliseconds, for which ranks are not equally long.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ranks and the links between them."""

    num_ranks: int
    rate_mbit: float | None
    num_rounds: int = 5
    """Rows of collectives that are timed, of both kinds in turn."""


CASES = [Case(num_ranks=num_ranks, rate_mbit=rate) for num_ranks in (2, 4) for rate in (200.0, 1000.0, None)]


def section(_: int) -> Section:
    """All-to-alls and all-gathers, gloo's own and OSDP's."""
    return Section(name="collectives", cases=on_links_that_can_be_had(CASES), measure=measure, table=table)


def measure(case: Case) -> dict[str, Any]:
    """Times every collective at every size."""
    where = "benchmarks.measures.accuracy.collectives:on_one_rank"
    return {"seconds": on_ranks(case.num_ranks, case.rate_mbit, where, num_rounds=case.num_rounds)}


def on_one_rank(*, num_rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of one collective beyond the computing before it; every rank runs this.

    Returns:
        Bytes of a shard -> seconds by name.
    """
    torch.set_num_threads(1)
    matrix, found = torch.ones(_WIDTH, _WIDTH), {}
    for size in _SHARDS_BYTES:
        shard, whole = torch.zeros(size // 4), torch.zeros(dist.get_world_size() * size // 4)
        received = torch.zeros_like(whole)
        runs: dict[str, Callable[[], object]] = {
            "computing": _nothing,
            "all-to-all of gloo": partial(dist.all_to_all_single, received, whole),
            "all-to-all": partial(_all_to_all, received, whole),
            "all-gather of gloo": partial(dist.all_gather_single, whole, shard),
            "all-gather": partial(all_gather, whole, shard),
        }
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(1 + num_rounds):
            for name, run in runs.items():
                dist.barrier()
                start_s = time.perf_counter()
                for _ in range(_IN_A_ROW):
                    for _ in range(_PRODUCTS):
                        matrix @ matrix
                    run()
                dist.barrier()
                taken[name].append((time.perf_counter() - start_s) / _IN_A_ROW)
        each_s = {name: median(seconds[1:]) for name, seconds in taken.items()}
        computing_s = each_s.pop("computing")
        found[str(size)] = {name: max(0.0, seconds - computing_s) for name, seconds in each_s.items()}
    return found


def _nothing() -> None:
    """Stands in for a collective."""


def _all_to_all(received: torch.Tensor, whole: torch.Tensor) -> None:
    begin_all_to_all(received, whole).wait()


def table(rows: Sequence[Row]) -> Table:
    """Milliseconds of each, and what the link takes for the bytes alone."""
    drawn = Table(
        "ranks", "links", "shard", "the bytes alone", "all-to-all: gloo's", "OSDP's", "all-gather: gloo's", "OSDP's",
        title="Collectives on gloo, ms",
    )  # fmt: skip
    for row in rows:
        case = row["case"]
        for size, seconds in row["seconds"].items():
            alone_s = None
            if case["rate_mbit"] is not None:
                alone_s = 8 * (case["num_ranks"] - 1) * int(size) / (1e6 * case["rate_mbit"])
            drawn.add_row(
                str(case["num_ranks"]),
                rate_of(row),
                f"{int(size) // 2**10} KiB",
                "" if alone_s is None else f"{1e3 * alone_s:.1f}",
                *(f"{1e3 * each:.1f}" for each in seconds.values()),
            )
    return drawn
