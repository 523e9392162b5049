"""Peaks of what OSDP is compared with, counted while its Trainer trains, for all sizes of micro-batches of interest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from rich.table import Table

from benchmarks.families import build
from benchmarks.measures.accuracy.memory import ANY_RATES, FREE
from benchmarks.measures.beside_fsdp.cases import BASE, Contest
from benchmarks.measures.section import Results, Row, Section, measured
from benchmarks.testbed.beside_fsdp.lightning_fsdp import PARALLELIZED, SPARSE, Baseline, Way
from benchmarks.testbed.groups import counted_group, fake_group, group_of_one
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.plans import largest_that_fits
from lightning_osdp import Cluster, ModelProfile, profile_model, simulate
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Model, and the ranks on which it trains; peaks are counted on rank 0."""

    model: str
    num_ranks: int
    node_size: int | None = None
    """Ranks of a node; None: all are in one."""

    @property
    def section(self) -> str:
        """Name in a results file."""
        nodes = "" if self.node_size is None else f" in nodes of {self.node_size}"
        return f"peaks, {self.model} on {self.num_ranks} ranks{nodes}"


@dataclass(frozen=True, kw_only=True)
class Case(Ranks):
    """One way to train, counted at several sizes of micro-batches."""

    way: Way
    divisions: tuple[tuple[int, int], ...]
    """Micro-batch and number of micro-batches that are counted."""
    limits: tuple[float, ...]
    """Factors of the peak of `BASE` with one sample: one micro-batch a step is counted with the most samples that
    fit each."""


Baselines: TypeAlias = Mapping[Ranks, Sequence[Baseline]]


def counted(contests: Sequence[Contest], results: Results, *, is_fresh: bool) -> Baselines:
    """Ways to train of contests with their peaks; counts and prints those that the results lack, or all if fresh."""
    found = {}
    ranks = [_ranks(model, contest) for contest in contests for model in contest.models]
    for each in dict.fromkeys(ranks):
        among = [contest for contest in contests if each in [_ranks(model, contest) for model in contest.models]]
        section = Section(name=each.section, cases=_cases(each, among), measure=measure, table=table)
        measured(section, results, is_fresh=is_fresh)
        found[each] = [
            Baseline(**row["case"]["way"], **{name: peak[name] for name in _SIZES})
            for row in results.stored(section.name)
            for peak in row["peaks"]
        ]
    return found


_SIZES = ("micro_batch_size", "num_micro_batches", "counted_bytes")


def _ranks(model: str, contest: Contest) -> Ranks:
    return Ranks(model=model, num_ranks=contest.num_ranks, node_size=contest.node_size)


def _cases(ranks: Ranks, contests: Sequence[Contest]) -> list[Case]:
    divisions, limits = dict[tuple[int, int], None](), dict[float, None]()
    for contest in contests:
        sizes = (contest.micro_batch_size, contest.num_micro_batches)
        divisions[sizes] = None
        if contest.division == "auto":
            samples = sizes[0] * sizes[1]
            divisions |= {(size, samples // size): None for size in range(1, samples + 1) if samples % size == 0}
        if contest.division == "scale":
            limits |= {limit: None for limit in contest.limits if limit is not None}
    ways = dict.fromkeys(way for contest in contests for way in contest.rivals)
    return [
        Case(**vars(ranks), way=way, divisions=tuple(sorted(divisions)), limits=tuple(sorted(limits))) for way in ways
    ]


def measure(case: Case) -> dict[str, Any]:
    """Counts live bytes in one process as rank 0 of N; predicted are those of a plan."""
    sizes = [*case.divisions]
    for limit in case.limits:
        most = _most_samples(case, limit * counted_bytes(case, BASE, 1, 1))
        sizes += [(most, 1)] if most else []
    return {
        "peaks": [
            {
                "micro_batch_size": size,
                "num_micro_batches": number,
                "counted_bytes": counted_bytes(case, case.way, size, number),
                "predicted_bytes": _predicted_bytes(case, size, number) if case.way.is_predicted else None,
            }
            for size, number in dict.fromkeys(sizes)
        ]
    }


def _most_samples(case: Case, limit_bytes: float) -> int:
    """Samples of the largest micro-batch that is counted to fit; 0 where none fits."""
    plan = _plan(case, case.way, 1, 1)
    found = largest_that_fits(plan, _profile(case.model), _cluster(case), limit_bytes=int(limit_bytes))
    size = 0 if found is None else found.micro_batch_size
    while size and counted_bytes(case, case.way, size, 1) > limit_bytes:
        size -= 1
    while counted_bytes(case, case.way, size + 1, 1) <= limit_bytes:
        size += 1
    return size


def _predicted_bytes(case: Case, micro_batch_size: int, num_micro_batches: int) -> int:
    plan = _plan(case, case.way, micro_batch_size, num_micro_batches)
    return simulate(plan, _profile(case.model), _cluster(case)).peak.peak_bytes


def _plan(ranks: Ranks, way: Way, micro_batch_size: int, num_micro_batches: int) -> Plan:
    return way.plan(
        build(ranks.model),
        world_size=ranks.num_ranks,
        node_size=ranks.node_size,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
    )


def _cluster(ranks: Ranks) -> Cluster:
    return Cluster(
        world_size=ranks.num_ranks,
        node_size=ranks.node_size,
        all_gather=FREE,
        reduce_scatter=FREE,
        reduce_scatter_copies=True,
    )


@cache
def _profile(model: str) -> ModelProfile:
    with torch.device("meta"):
        module = build(model)
    return profile_model(module, module.batch(2), rates=ANY_RATES, activations=("keep", "recompute"))


def counted_bytes(ranks: Ranks, way: Way, micro_batch_size: int, num_micro_batches: int) -> int:
    """Peak of one step of Lightning's Trainer."""
    of = Ranks(model=ranks.model, num_ranks=ranks.num_ranks, node_size=ranks.node_size)
    return _counted_bytes(of, way, micro_batch_size, num_micro_batches)


@cache
def _counted_bytes(ranks: Ranks, way: Way, micro_batch_size: int, num_micro_batches: int) -> int:
    # functional collectives, which DTensors call, are of torch's own backends alone, those of sparse tensors of gloo
    groups: dict[str, Callable[[int], AbstractContextManager[Any]]] = {
        PARALLELIZED: fake_group,
        SPARSE: group_of_one,
    }
    with groups.get(way.sharding, counted_group)(ranks.num_ranks):
        module = build(ranks.model)
        plan = _plan(ranks, way, micro_batch_size, num_micro_batches)
        return count_step(module, plan, strategy=way.strategy(module, node_size=ranks.node_size)).peak_bytes


def table(rows: Sequence[Row]) -> Table:
    """Draws one line for each size."""
    drawn = Table("model", "who", "b x K", title="Counted peaks of what OSDP is compared with")
    for column in ("peak", "predicted"):
        drawn.add_column(column, justify="right")
    for row in rows:
        name = Way(**row["case"]["way"]).name
        for peak in row["peaks"]:
            found, predicted = peak["counted_bytes"], peak.get("predicted_bytes")
            drawn.add_row(
                row["case"]["model"],
                name,
                f"{peak['micro_batch_size']} x {peak['num_micro_batches']}",
                format_bytes(found),
                "" if predicted is None else f"{predicted / found - 1:+.2%}",
            )
    return drawn
