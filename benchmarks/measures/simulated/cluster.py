"""Samples/s of OSDP and of FSDP at each one's best micro-batch, simulated for machines and sizes that are not here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.families import Family
from benchmarks.measures.section import Row, Section, Target
from benchmarks.measures.simulated import tables
from benchmarks.measures.simulated.machines import Model, Place
from benchmarks.measures.simulated.tables import FSDP, OSDP
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Way
from benchmarks.testbed.plans import largest_that_fits
from lightning_osdp import (
    Cluster,
    InfeasibleError,
    ModelProfile,
    SearchSpace,
    make_plan,
    simulate,
)
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.profiler.without_weights import DescribedModel
from lightning_osdp.simulation import StepEstimate

_NUM_SAMPLES = 4
"""That profiles are made with."""
_AS_GOOD = 0.999
"""Of the best FSDP's samples/s: a sweep stops where no size can be better by more than a thousandth."""

FSDP_WAYS = dict(
    zip(
        FSDP,
        (
            Way(sharding="FULL_SHARD", is_fully_shard=True),
            Way(sharding="FULL_SHARD", is_fully_shard=True, by_operator=True),
            Way(sharding="SHARD_GRAD_OP", is_fully_shard=True),
            Way(sharding="FULL_SHARD", is_fully_shard=True, recomputes=True),
            Way(sharding="FULL_SHARD", is_fully_shard=True, by_operator=True, recomputes=True),
            Way(sharding="SHARD_GRAD_OP", is_fully_shard=True, recomputes=True),
        ),
        strict=True,
    )
)
OSDP_SPACES = dict(
    zip(
        OSDP,
        (SearchSpace(slices=(1,), activations=("keep",)), SearchSpace(activations=("keep",)), SearchSpace()),
        strict=True,
    )
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine, in so much memory."""

    machine: Place
    model: Model
    limit_gib: float
    """2^30 bytes of a rank."""

    def __str__(self) -> str:
        """What stands in a line of progress."""
        return f"{self.model.layers} on {self.machine.name}, {self.limit_gib:g} GiB"


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One that takes part, at its best micro-batch."""

    name: str
    micro_batch_size: int
    samples_per_s: float
    predicted_s: float
    compute_s: float
    exposed_s: float
    """Seconds in which computing waits for collectives."""
    overhead_s: float
    predicted_bytes: int
    plan: str
    cpu_s: float
    """Of finding it, here."""


def section(cases: Sequence[Case]) -> Section:
    """All cases."""
    return Section(
        name="papers",
        cases=cases,
        measure=measure,
        table=tables.details,
        targets=targets,
        misses=tables.remarks,
    )


def measure(case: Case) -> dict[str, Any]:
    """Profiles the model by the machine's rates, and lets everybody look for the best micro-batch.

    Returns:
        The parameters of the model, CPU seconds of profiling, and the `Entrant`s that fit.
    """
    module, start_s = case.model.on_meta(), time.process_time()
    profile = profiled(module, case.machine)
    profile_s = time.process_time() - start_s
    search = partial(_entrant, profile=profile, cluster=case.machine.machine.cluster)
    entrants = [search(name, find=find) for name, find in _contestants(module, profile, case)]
    return {
        "num_parameters": sum(parameter.numel() for parameter in module.parameters()),
        "profile_cpu_s": profile_s,
        "entrants": [asdict(entrant) for entrant in entrants if entrant is not None],
    }


def profiled(module: Family, place: Place) -> ModelProfile:
    """What a model on the meta device would take on a machine."""
    model = DescribedModel(module=module, batch=module.batch(_NUM_SAMPLES), run=module.loss)
    return model.profile(place.machine.rates, precision=place.precision)


def _contestants(module: Family, profile: ModelProfile, case: Case) -> Iterator[tuple[str, Callable[[], Plan | None]]]:
    cluster, limit_bytes = case.machine.machine.cluster, round(case.limit_gib * 2**30)
    for name, way in FSDP_WAYS.items():
        plan = way.plan(module, world_size=cluster.world_size, micro_batch_size=1)
        yield name, partial(largest_that_fits, plan, profile, cluster, limit_bytes=limit_bytes)
    for name, space in OSDP_SPACES.items():
        yield name, partial(_planned, profile, cluster, limit_bytes=limit_bytes, space=space)


def _planned(profile: ModelProfile, cluster: Cluster, *, limit_bytes: int, space: SearchSpace) -> Plan | None:
    try:
        return make_plan(
            profile, cluster, memory_limit_bytes=limit_bytes, micro_batch_size=BatchPolicy.scale(), search_space=space
        )
    except InfeasibleError:
        return None


def _entrant(name: str, *, find: Callable[[], Plan | None], profile: ModelProfile, cluster: Cluster) -> Entrant | None:
    start_s = time.process_time()
    plan = find()
    cpu_s = time.process_time() - start_s
    if plan is None:
        return None
    step: StepEstimate = simulate(plan, profile, cluster)
    return Entrant(
        name=name,
        micro_batch_size=plan.micro_batch_size,
        samples_per_s=cluster.world_size * plan.micro_batch_size / step.time_s,
        predicted_s=step.time_s,
        compute_s=step.compute_s,
        exposed_s=step.exposed_communication_s,
        overhead_s=step.overhead_s,
        predicted_bytes=step.peak.peak_bytes,
        plan=_in_words(plan),
        cpu_s=cpu_s,
    )


def _in_words(plan: Plan) -> str:
    modes = [mode for unit in plan.units if unit.name for mode in unit.modes]
    split = sum(unit.num_slices > 1 for unit in plan.units)
    words = [f"{modes.count('DP')} of {len(modes)} kept gathered"]
    words += [f"{split} units split"] if split else []
    words += [f"{len(plan.blocks)} blocks recompute"] if plan.blocks else []
    return ", ".join(words)


def targets(rows: Sequence[Row]) -> list[Target]:
    """OSDP is nowhere predicted to be slower than an FSDP that may do less."""
    found = []
    for name in OSDP:
        ratios = [ratio for row in rows if (ratio := tables.over_best(row, name)) is not None]
        found.append(
            Target(name=f"{name}: least over the best FSDP", limit=_AS_GOOD, measured=min(ratios), is_least=True)
        )
    return found
