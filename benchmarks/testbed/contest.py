"""Ranks on which OSDP's plans and Lightning's own FSDP take steps in turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from benchmarks.families import Family
from benchmarks.families.text import MinGPT
from benchmarks.testbed.lightning_fsdp import LightningStep, Sharding, lightning_plan
from benchmarks.testbed.ring import ring_reduce_scatters
from benchmarks.testbed.step import Step, time_in_turns
from examples.mingpt.model import GPTConfig
from lightning_osdp import Cluster, ModelProfile, make_plan, measure_cluster, profile_model, simulate
from lightning_osdp.core.plan import Plan
from lightning_osdp.report.accumulation import wire_bytes
from lightning_osdp.simulation.plan import planned_units

UNLIMITED = 2**62
"""Bytes."""


class GPT6x512(MinGPT):
    """19 million parameters, nearly all of them in six blocks."""

    config = GPTConfig(sequence_length=128, num_layers=6, num_heads=8, hidden_size=512)


class TinyGPT(MinGPT):
    """As quick as can be."""

    config = GPTConfig(vocabulary_size=32, sequence_length=8, num_layers=2, num_heads=2, hidden_size=32)


MODELS: Mapping[str, type[MinGPT]] = {"gpt_6x512": GPT6x512, "gpt_tiny": TinyGPT}


def build(name: str) -> Family:
    """One of `MODELS`, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Lightning's own FSDP with so many samples in so many micro-batches, and its counted peak."""

    sharding: Sharding
    micro_batch_size: int
    num_micro_batches: int
    counted_bytes: int

    def plan(self, module: Family, world_size: int) -> Plan:
        """As a plan; see `lightning_plan`."""
        size, number = self.micro_batch_size, self.num_micro_batches
        return lightning_plan(
            module, self.sharding, world_size=world_size, micro_batch_size=size, num_micro_batches=number
        )


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One that takes part, for one limit: what is predicted, and what was measured."""

    name: str
    """A sharding of Lightning's, or ``OSDP``."""
    limit: float | None
    """Factor of the counted peak of FULL_SHARD; None: unlimited."""
    plan: str
    """As JSON; where two are equal, one was run for both."""
    counted_bytes: int | None
    """Peak; None where it is yet to be counted."""
    predicted_bytes: int
    predicted_s: float
    compute_s: float
    """Predicted."""
    wire_bytes: float
    """That a rank sends in a step."""
    measured_s: float = 0.0
    """Fastest step of the slowest rank."""


_Entry: TypeAlias = tuple[str, float | None, Plan, Baseline | None]


def on_one_rank(
    *,
    model: str,
    baselines: Sequence[Mapping[str, Any]],
    limits: Sequence[tuple[float | None, int]],
    micro_batch_size: int,
    num_micro_batches: int,
    is_auto: bool,
    num_rounds: int,
) -> list[dict[str, Any]]:
    """What every rank runs: profiles, measures the links, plans for every limit, and takes steps in turns.

    Args:
        model: of `MODELS`.
        baselines: fields of `Baseline` that may take part, each under the limits that it fits.
        limits: factor and bytes of each.
        micro_batch_size: samples that are profiled.
        num_micro_batches: in an optimizer step.
        is_auto: whether samples of a step may be divided in other ways; of each baseline, the one that is predicted to
            be the fastest takes part.
        num_rounds: timed steps.

    Returns:
        Fields of an `Entrant` for each limit and competitor.
    """
    with ring_reduce_scatters():
        cluster = measure_cluster(torch.device("cpu"))
        profile = profile_model(build(model), build(model).batch(micro_batch_size))
        entrants: list[Entrant] = []
        if dist.get_rank() == 0:
            known = [Baseline(**fields) for fields in baselines]
            plans = _Plans(build(model), profile, cluster, micro_batch_size, num_micro_batches, is_auto=is_auto)
            for limit, limit_bytes in limits:
                fitting = [each for each in known if each.counted_bytes <= limit_bytes]
                entrants += [plans.entrant(*entry) for entry in plans.entries(fitting, limit, limit_bytes)]
        return [asdict(entrant) for entrant in _timed(model, entrants, num_rounds)]


class _Plans:
    """Plans for a model on these ranks, as rank 0 sees them."""

    def __init__(
        self,
        module: Family,
        profile: ModelProfile,
        cluster: Cluster,
        micro_batch_size: int,
        num_micro_batches: int,
        *,
        is_auto: bool,
    ) -> None:
        self._module, self._profile, self._cluster = module, profile, cluster
        self._size, self._number, self._is_auto = micro_batch_size, num_micro_batches, is_auto

    def entries(self, fitting: Iterable[Baseline], limit: float | None, limit_bytes: int) -> list[_Entry]:
        """Those that take part under a limit."""
        best: dict[str, tuple[float, _Entry]] = {}
        for baseline in fitting:
            plan = self._with_bytes(baseline.plan(self._module, self._cluster.world_size))
            predicted_s = simulate(plan, self._profile, self._cluster).time_s
            if baseline.sharding not in best or predicted_s < best[baseline.sharding][0]:
                best[baseline.sharding] = (predicted_s, (baseline.sharding, limit, plan, baseline))
        plan = make_plan(
            self._profile,
            self._cluster,
            memory_limit_bytes=limit_bytes,
            micro_batch_size="auto" if self._is_auto else self._size,
            num_micro_batches=1 if self._is_auto else self._number,
            samples_per_step=self._size * self._number if self._is_auto else None,
        )
        return [*(entry for _, entry in best.values()), ("OSDP", limit, plan, None)]

    def entrant(self, name: str, limit: float | None, plan: Plan, baseline: Baseline | None) -> Entrant:
        """With what is predicted."""
        estimate = simulate(plan, self._profile, self._cluster)
        return Entrant(
            name=name,
            limit=limit,
            plan=replace(plan, memory_limit_bytes=UNLIMITED).to_json(),
            counted_bytes=None if baseline is None else baseline.counted_bytes,
            predicted_bytes=estimate.peak.peak_bytes,
            predicted_s=estimate.time_s,
            compute_s=estimate.compute_s,
            wire_bytes=wire_bytes(plan),
        )

    def _with_bytes(self, plan: Plan) -> Plan:
        _, profiles, _ = planned_units(plan, self._profile)
        sizes = {unit.name: unit.gathered_bytes for unit in profiles}
        return replace(plan, units=tuple(replace(unit, parameter_bytes=sizes[unit.name]) for unit in plan.units))


def _timed(model: str, entrants: Sequence[Entrant], num_rounds: int) -> list[Entrant]:
    """Those of rank 0, on every rank, with the seconds of their steps; equal plans are run once."""
    shared: list[Any] = [entrants]
    dist.broadcast_object_list(shared, src=0)
    entrants = shared[0]
    steps = {_key(entrant): _step(model, entrant) for entrant in entrants}
    taken = time_in_turns(steps, num_rounds=num_rounds)
    seconds = torch.tensor([*taken.values()], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    fastest = dict(zip(taken, seconds.min(1).values.tolist(), strict=True))
    return [replace(entrant, measured_s=fastest[_key(entrant)]) for entrant in entrants]


def _key(entrant: Entrant) -> str:
    return f"{entrant.name} {entrant.plan}"


def _step(model: str, entrant: Entrant) -> Step:
    plan = Plan.from_json(entrant.plan)
    if entrant.name == "OSDP":
        return Step(build(model), plan)
    return LightningStep(build(model), plan, entrant.name)  # type: ignore[arg-type]  # one of Lightning's
