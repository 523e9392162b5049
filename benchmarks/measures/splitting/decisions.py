"""Decisions 0 to 4: so many of four slices are ZDP and the rest DP, on attention or on the MLP of a small minGPT."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from rich.table import Table

from benchmarks.families import build
from benchmarks.measures.accuracy.memory import ANY_RATES
from benchmarks.measures.accuracy.step_time import Timed, compared_s
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.namespaces import Hosts, why_unavailable
from benchmarks.testbed.plans import plan_of
from lightning_osdp import Plan, measure_cluster, profile_model
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.units import partition
from lightning_osdp.strategy.runtime.all_ranks import in_step

_log = logging.getLogger(__name__)

FAMILY, NUM_RANKS, MICRO_BATCH, RATE_MBIT, NUM_ROUNDS = "mingpt", 4, 2, 200.0, 8
OPERATORS = {"attention": ("attention.qkv", "attention.proj"), "mlp": ("mlp.expand", "mlp.proj")}
"""Of every block; all other units are whole and ZDP."""
NUM_SLICES = 4
PROMISED = 0.05
"""Largest error of a decision's predicted time."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """All decisions, taken in turns on shaped links."""

    family: str = FAMILY
    num_ranks: int = NUM_RANKS
    rate_mbit: float = RATE_MBIT
    num_rounds: int = NUM_ROUNDS


def section(num_rounds: int) -> Section:
    """One case; none where network namespaces are not to be had."""
    reason = why_unavailable()
    if reason is not None:
        _log.warning("Decisions are not measured: %s.", reason)
    return Section(
        name="decisions",
        cases=[] if reason else [Case(num_rounds=num_rounds)],
        measure=measure,
        table=table,
        targets=targets,
        misses=misses,
    )


def measure(case: Case) -> dict[str, Any]:
    """Seconds on ranks of one machine, and bytes counted on rank 0 of as many.

    Returns:
        Under ``plans`` what each is called, ``predicted_s``, ``measured_s`` and ``counted_bytes``.
    """
    counted = {}
    for name, plan in decisions(case.num_ranks).items():
        with fake_group(case.num_ranks):
            counted[name] = count_step(build(case.family), plan).peak_bytes
    with Hosts(case.num_ranks, rate_mbit=case.rate_mbit) as hosts:
        arguments = {"num_rounds": case.num_rounds}
        (plans, *_) = hosts.run("benchmarks.measures.splitting.decisions:on_one_rank", arguments, timeout_s=1800)
    return {"plans": [{**plan, "counted_bytes": counted[plan["modes"]]} for plan in plans]}


def on_one_rank(*, num_rounds: int) -> list[dict[str, Any]]:
    """What every rank runs."""
    cluster = measure_cluster(torch.device("cpu"))
    profile = profile_model(build(FAMILY), build(FAMILY).batch(MICRO_BATCH), together=in_step)
    plans = decisions(cluster.world_size)
    return [asdict(each) for each in compared_s(lambda: build(FAMILY), plans, profile, cluster, num_rounds=num_rounds)]


def decisions(world_size: int) -> dict[str, Plan]:
    """Plans as ``attention 0`` to ``mlp 4``."""
    module = build(FAMILY)
    profile = profile_model(module, module.batch(MICRO_BATCH), rates=ANY_RATES)
    names = [unit.name for unit in partition(profile) if not unit.is_root]
    return {
        f"{operators} {num_sharded}": plan_of(
            module,
            {
                name: ("ZDP",) * num_sharded + ("DP",) * (NUM_SLICES - num_sharded) if name.endswith(ends) else "ZDP"
                for name in names
            },
            world_size=world_size,
            micro_batch_size=MICRO_BATCH,
            backward_prefetch="none",
        )
        for operators, ends in OPERATORS.items()
        for num_sharded in range(NUM_SLICES + 1)
    }


def table(rows: Sequence[Row]) -> Table:
    """One line per decision."""
    title = f"Decisions of {NUM_SLICES} slices of {FAMILY}, {NUM_RANKS} ranks over {RATE_MBIT:g} Mbit/s"
    drawn = Table("ZDP slices", title=title)
    for column in ("peak, counted", "step, measured", "predicted", "error"):
        drawn.add_column(column, justify="right")
    for plan in _plans(rows):
        drawn.add_row(
            plan["modes"],
            format_bytes(plan["counted_bytes"]),
            f"{plan['measured_s']:.3f} s",
            f"{plan['predicted_s']:.3f} s",
            f"{error(plan):+.1%}",
        )
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """The worst error, and decisions that do not trade time for memory."""
    plans = _plans(rows)
    if not plans:
        return []
    return [
        Target(
            name="decisions: worst error of step time",
            limit=PROMISED,
            measured=max(abs(error(plan)) for plan in plans),
        ),
        Target(name="decisions: not between their neighbours", limit=1, measured=len(misses(rows))),
    ]


def misses(rows: Sequence[Row]) -> list[str]:
    """Decisions that take no less memory or no more time than the one with a ZDP slice less."""
    found = []
    for fewer, more in pairwise(_plans(rows)):
        if fewer["modes"].split()[0] != more["modes"].split()[0]:
            continue
        if more["counted_bytes"] >= fewer["counted_bytes"]:
            found.append(f"{more['modes']} takes no less memory than {fewer['modes']}")
        found += [
            f"{more['modes']} takes no more time than {fewer['modes']}, {what}"
            for what in ("measured", "predicted")
            if more[f"{what}_s"] <= fewer[f"{what}_s"]
        ]
    return found


def error(plan: dict[str, Any]) -> float:
    """Positive where a plan was predicted too slow."""
    return Timed(modes=plan["modes"], predicted_s=plan["predicted_s"], measured_s=plan["measured_s"]).error


def _plans(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [plan for row in rows for plan in row["plans"]]
