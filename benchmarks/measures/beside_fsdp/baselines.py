"""Peaks of what OSDP is compared with, counted while its Trainer trains, for all sizes of micro-batches of interest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.table import Table

from benchmarks.families import build
from benchmarks.measures.accuracy.memory import FREE
from benchmarks.measures.section import Results, Row, Section, measured
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Baseline, Way
from benchmarks.testbed.groups import fake_group, simulated_group
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.plans import largest_that_fits
from lightning_osdp import Cluster, ModelProfile, profile_model
from lightning_osdp.core.text.byte_size import format_bytes

BASE = Way(sharding="FULL_SHARD", is_fully_shard=True)
"""What limits and ratios refer to."""
KEPT = Way(sharding="SHARD_GRAD_OP", is_fully_shard=True)
FULL_SHARD, SHARD_GRAD_OP = Way(sharding="FULL_SHARD"), Way(sharding="SHARD_GRAD_OP")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train on rank 0 of N."""

    model: str
    num_ranks: int
    way: Way
    limits: tuple[float, ...]
    """Factors of the peak of `BASE` with one sample: one micro-batch a step is counted with the most samples that
    fit each."""
    samples_per_step: int
    """All divisions of so many are counted."""
    node_size: int | None = None
    """Ranks of a node; None: all are in one."""


def known(models: Iterable[str], results: Results, *, is_fresh: bool, **asked: Any) -> dict[str, list[Baseline]]:
    """Of each model what takes part, with its peaks; counts and prints what the results do not have, or all if fresh.

    Other arguments are those of `section`.
    """
    found = {}
    for model in models:
        counted = section(model, **asked)
        measured(counted, results, is_fresh=is_fresh)
        found[model] = baselines_of(results.stored(counted.name))
    return found


def section(
    model: str,
    num_ranks: int,
    *,
    ways: Sequence[Way],
    limits: Sequence[float] = (),
    samples_per_step: int,
    node_size: int | None = None,
) -> Section:
    """One case for each way."""
    return Section(
        name=f"baselines, {model}",
        cases=[
            Case(
                model=model,
                num_ranks=num_ranks,
                way=way,
                limits=tuple(limits),
                samples_per_step=samples_per_step,
                node_size=node_size,
            )
            for way in ways
        ],
        measure=measure,
        table=table,
    )


def measure(case: Case) -> dict[str, Any]:
    """Counts live bytes in one process as rank 0 of N."""
    of_all = case.samples_per_step
    sizes = [(size, of_all // size) for size in range(1, of_all + 1) if of_all % size == 0]
    for limit in case.limits:
        sizes.append((1, 1))
        limit_bytes = limit * counted_bytes(case.model, case.num_ranks, BASE, 1, 1, node_size=case.node_size)
        sizes += [(most, 1) for most in [_most_samples(case, limit_bytes)] if most]
    return {
        "peaks": [
            {
                "micro_batch_size": size,
                "num_micro_batches": number,
                "counted_bytes": counted_bytes(
                    case.model, case.num_ranks, case.way, size, number, node_size=case.node_size
                ),
            }
            for size, number in dict.fromkeys(sizes)
        ]
    }


def _most_samples(case: Case, limit_bytes: float) -> int:
    """Of one micro-batch under a limit, counted; 0 where none fits."""

    def fits(size: int) -> bool:
        return counted_bytes(case.model, case.num_ranks, case.way, size, 1, node_size=case.node_size) <= limit_bytes

    size = _predicted(case, limit_bytes)
    while size and not fits(size):
        size -= 1
    while fits(size + 1):
        size += 1
    return size


def _predicted(case: Case, limit_bytes: float) -> int:
    cluster = Cluster(world_size=case.num_ranks, node_size=case.node_size, all_gather=FREE, reduce_scatter=FREE)
    plan = case.way.plan(build(case.model), world_size=case.num_ranks, node_size=case.node_size, micro_batch_size=1)
    found = largest_that_fits(plan, _profile(case.model), cluster, limit_bytes=int(limit_bytes))
    return 0 if found is None else found.micro_batch_size


@cache
def _profile(model: str) -> ModelProfile:
    return profile_model(build(model), build(model).batch(2), activations=("keep", "recompute"))


@cache
def counted_bytes(
    model: str, num_ranks: int, way: Way, micro_batch_size: int, num_micro_batches: int, *, node_size: int | None
) -> int:
    """Peak of one step of Lightning's Trainer."""
    # a gradient bucket that is reduced needs a result, which the fake backend does not give
    with simulated_group(num_ranks) if way.sharding == "DDP" else fake_group(num_ranks):
        module = build(model)
        plan = way.plan(
            module,
            world_size=num_ranks,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            node_size=node_size,
        )
        return count_step(module, plan, strategy=way.strategy(module, node_size=node_size)).peak_bytes


def table(rows: Sequence[Row]) -> Table:
    """One line per size."""
    drawn = Table("who", "b x K", title="Counted peaks of what OSDP is compared with")
    drawn.add_column("peak", justify="right")
    for baseline in baselines_of(rows):
        division = f"{baseline.micro_batch_size} x {baseline.num_micro_batches}"
        drawn.add_row(baseline.name, division, format_bytes(baseline.counted_bytes))
    return drawn


def baselines_of(rows: Sequence[Row]) -> list[Baseline]:
    """What was counted."""
    return [Baseline(**row["case"]["way"], **peak) for row in rows for peak in row["peaks"]]
