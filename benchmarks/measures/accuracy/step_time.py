"""Time of one step: predicted, and measured on ranks in network namespaces whose links have a chosen rate."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, count
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks.families import FAMILIES, Family, build
from benchmarks.measures.links import rate_of
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.namespaces import Hosts, why_unavailable
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.step import Step, time_in_turns
from lightning_osdp import Cluster, ModelProfile, measure_cluster, profile_model
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.units import partition
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.strategy.runtime.all_ranks import in_step

_log = logging.getLogger(__name__)

MICRO_BATCH = 2
NUM_RANKS = 4
RATES = (200.0, 1000.0, None)
"""Rates of the links in 10^6 bit/s; the last one is not shaped."""
MEDIAN, WORST = 0.05, 0.10
"""Errors that the project promises at each rate, over all families."""
NUM_MIXES, NUM_ROUNDS = 2, 6
QUIET = 0.03
"""Fraction by which predictions from profiles before and after the steps may differ: where they differ by more, other
programs or other machines on the same host have changed what this one can do, and the case is measured again."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Links of one rate."""

    family: str
    rate_mbit: float | None
    num_ranks: int = NUM_RANKS
    num_mixes: int = NUM_MIXES
    num_rounds: int = NUM_ROUNDS
    micro_batch_size: int = MICRO_BATCH
    num_micro_batches: int = 1
    is_ahead: bool = False
    """True where units are gathered ahead."""
    most_tries: int = 3


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One plan with the seconds of its step."""

    modes: str
    """Name of the plan: ``Z`` or ``D`` for each unit but the root, in forward order."""
    predicted_s: float
    measured_s: float
    """Fastest step of the slowest rank."""

    @property
    def error(self) -> float:
        """Error of the predicted step time, positive where it was predicted too slow."""
        return self.predicted_s / self.measured_s - 1


def section(num_cases: int) -> Section:
    """Section of all rates; of none where network namespaces are not to be had."""
    reason = why_unavailable()
    if reason is not None:
        _log.warning("Step times are not measured: %s.", reason)
    mixes = min(num_cases, NUM_MIXES)
    return Section(
        name="time",
        cases=[]
        if reason
        else [Case(family=family, rate_mbit=rate, num_mixes=mixes) for rate in RATES for family in FAMILIES],
        measure=measure,
        table=table,
        targets=targets,
    )


def overlap_section(num_cases: int) -> Section:
    """Steps whose collectives run beside computing, of the headline's models: those that tell most come first."""
    del num_cases
    links = [
        ("24 x 128", 200.0, 4, 1),
        ("2 x 768", 1000.0, 4, 1),
        ("24 x 128", 200.0, 2, 1),
        ("24 x 128", 1000.0, 4, 1),
        ("128 to 512", 200.0, 4, 1),
        ("2 x 768", 200.0, 4, 1),
        ("24 x 128", 200.0, 4, 4),
        ("128 to 512", 1000.0, 4, 1),
        ("24 x 128", None, 4, 1),
        ("2 x 768", None, 4, 1),
    ]
    cases = [
        Case(
            family=family,
            rate_mbit=rate,
            num_ranks=ranks,
            num_mixes=1,
            num_rounds=4,
            micro_batch_size=4,
            num_micro_batches=number,
            is_ahead=True,
            most_tries=1,
        )
        for family, rate, ranks, number in links
    ]
    return replace(section(1), name="overlap", cases=[] if why_unavailable() else cases)


def measure(case: Case) -> dict[str, Any]:
    """Measures all-ZDP, all-DP and random mixes on ranks of one machine, interleaved, one thread each."""
    arguments = {name: value for name, value in asdict(case).items() if name not in ("rate_mbit", "num_ranks")}
    with Hosts(case.num_ranks, rate_mbit=case.rate_mbit) as hosts:
        found: list[dict[str, Any]] = hosts.run(
            "benchmarks.measures.accuracy.step_time:on_one_rank", arguments, timeout_s=1800
        )
    return found[0]


def table(rows: Sequence[Row]) -> Table:
    """One line per family and rate."""
    drawn = Table("links", "ranks", "family", "b x K", title="Step time, predicted against the fastest measured")
    names = ("ZDP", "DP", "mixed")
    columns = [f"{name} {what}" for name in names for what in ("predicted", "measured")]
    columns += ["median error", "worst", "tau", "drift"]
    for column in columns:
        drawn.add_column(column, justify="right")
    for row in rows:
        plans = _timed(row)
        errors = sorted(abs(plan.error) for plan in plans)
        case = row["case"]
        drawn.add_row(
            rate_of(row),
            str(case.get("num_ranks", NUM_RANKS)),
            case["family"],
            f"{case.get('micro_batch_size', MICRO_BATCH)} x {case.get('num_micro_batches', 1)}",
            *(f"{seconds:.3f} s" for plan in plans[: len(names)] for seconds in (plan.predicted_s, plan.measured_s)),
            f"{median(errors):.1%}",
            f"{max(plans, key=lambda plan: abs(plan.error)).error:+.1%}",
            f"{kendall_tau(plans):.2f}",
            f"{row['drift']:.1%}",
        )
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """Median and worst error at each rate."""
    found = []
    for rate in dict.fromkeys(map(rate_of, rows)):
        errors = [abs(plan.error) for row in rows if rate_of(row) == rate for plan in _timed(row)]
        for what, limit, error in (("median", MEDIAN, median(errors)), ("worst", WORST, max(errors))):
            found.append(Target(name=f"step time, {rate}: {what} error", limit=limit, measured=error))
    return found


def kendall_tau(plans: Sequence[Timed]) -> float:
    """Kendall's tau of the predicted order and the measured one: 1 all pairs agree, 0 as many as not, -1 none."""
    pairs = [
        (one.predicted_s - other.predicted_s) * (one.measured_s - other.measured_s)
        for one, other in combinations(plans, 2)
    ]
    return sum((pair > 0) - (pair < 0) for pair in pairs) / max(1, len(pairs))


def _timed(row: Row) -> list[Timed]:
    return [Timed(**plan) for plan in row["plans"]]


def on_one_rank(
    *,
    family: str,
    num_mixes: int,
    num_rounds: int,
    micro_batch_size: int,
    num_micro_batches: int,
    is_ahead: bool,
    most_tries: int,
) -> dict[str, Any]:
    """Profiles, measures the links, predicts, takes the steps, and profiles once more; every rank runs this.

    Arguments are fields of a `Case`.

    Returns:
        Fields of a `Timed` for each plan, and how far the two predictions differ at most.
    """
    for tries in count(1):
        profile, cluster = _seen(family, micro_batch_size)
        plans = _plans(
            build(family),
            profile,
            num_mixes,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
            forward_prefetch=is_ahead,
            backward_prefetch="pre" if is_ahead else "none",
        )
        timed = compared_s(lambda: build(family), plans, profile, cluster, num_rounds=num_rounds)
        again = _seen(family, micro_batch_size)
        later_s = [predicted_s(plan, *again) for plan in plans.values()]
        drift = max(abs(later / each.predicted_s - 1) for later, each in zip(later_s, timed, strict=True))
        if drift <= QUIET or tries == most_tries:
            return {"plans": [asdict(each) for each in timed], "drift": drift}
    raise AssertionError


def _seen(family: str, micro_batch_size: int) -> tuple[ModelProfile, Cluster]:
    module = build(family)
    parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
    cluster = measure_cluster(torch.device("cpu"), parameter_bytes=parameter_bytes)
    return profile_model(module, module.batch(micro_batch_size), together=in_step), cluster


def compared_s(
    make: Callable[[], Family], plans: Mapping[str, Plan], profile: ModelProfile, cluster: Cluster, *, num_rounds: int
) -> list[Timed]:
    """Predicts steps under plans, and takes them in turns. Call it on all ranks."""
    taken = time_in_turns({name: Step(make(), plan) for name, plan in plans.items()}, num_rounds=num_rounds)
    seconds = torch.tensor([*taken.values()], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    fastest = seconds.min(1).values.tolist()
    return [
        Timed(modes=name, predicted_s=predicted_s(plan, profile, cluster), measured_s=measured_s)
        for (name, plan), measured_s in zip(plans.items(), fastest, strict=True)
    ]


def predicted_s(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """Seconds of a step as rank 0 predicts them; each has profiled for itself."""
    seconds = torch.tensor(simulate(plan, profile, cluster).time_s, dtype=torch.float64)
    dist.broadcast(seconds, src=0)
    return float(seconds)


def _plans(module: Family, profile: ModelProfile, num_mixes: int, **fields: Any) -> dict[str, Plan]:
    draw = random.Random(0)
    names = [unit.name for unit in partition(profile) if not unit.is_root]
    modes = ["Z" * len(names), "D" * len(names)]
    modes += ["".join(draw.choice("ZD") for _ in names) for _ in range(num_mixes)]
    return {
        letters: plan_of(
            module,
            {name: {"Z": "ZDP", "D": "DP"}[letter] for name, letter in zip(names, letters, strict=True)},
            world_size=dist.get_world_size(),
            **fields,
        )
        for letters in modes
    }
