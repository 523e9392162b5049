"""Ranks on which OSDP's plans and Lightning's own strategies train in turns, each through a Trainer."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from math import inf, log
from statistics import fmean
from typing import Any, Literal, TypeAlias
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from typing_extensions import override

from benchmarks.families import Family, build
from benchmarks.testbed.beside_fsdp.lightning_fsdp import UNSHARDED, Baseline, Way
from benchmarks.testbed.beside_fsdp.turns import Turns, cpu_seconds, fastest_of_slowest, fits_in_turns, seconds_of
from benchmarks.testbed.by_hand import waited_reduce_scatters
from benchmarks.testbed.plans import sent_bytes
from benchmarks.testbed.training import quiet, train
from lightning_osdp import (
    Cluster,
    ModelProfile,
    OSDPStrategy,
    PlanMethod,
    SearchSpace,
    make_plan,
    measure_cluster,
    profile_model,
    simulate,
)
from lightning_osdp.callbacks.peak import WARM_UP_STEPS
from lightning_osdp.core.affine import ZERO
from lightning_osdp.core.axes import STATIONARY
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.correction import Correction
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.slices import slice_names
from lightning_osdp.planner.assign import assign_ahead
from lightning_osdp.planner.scheduler import ANY_PREFETCH, are_close, candidates, judge_plan
from lightning_osdp.planner.scheduler.planned import plan_of
from lightning_osdp.planner.scheduler.planning import planned_setting
from lightning_osdp.planner.simulation.plan import planned_step
from lightning_osdp.planner.simulation.step import StepEstimate
from lightning_osdp.strategy.runtime.all_ranks import in_step

UNLIMITED = 2**62
"""Bytes of a limit that limits nothing."""

_MANY_SAMPLES = 12
"""Samples that are profiled, too, where micro-batches may be of any size."""

_RECOMPUTING = ("keep", "recompute", "selective")
"""Choices of blocks for what they save that any of OSDP's plans may have."""

Division: TypeAlias = Literal["held", "auto", "scale"]
"""Choice that is open for micro-batches: none; the division of a step's samples; any size, one of it a step."""


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """Plan that takes part under one limit: what is predicted, and what was measured."""

    name: str
    limit: float | None
    """Factor of the counted peak of fully_shard FULL_SHARD; None: unlimited."""
    way: Way | None
    """Way to train without OSDP; None: a plan that OSDP has searched."""
    plan: str
    """Plan as JSON; where two take equal steps, one was run for both."""
    counted_bytes: int | None
    """Peak; None where it is yet to be counted."""
    predicted_bytes: int | None
    predicted_s: float | None
    """Predicted seconds of a step; None where not `Way.is_predicted`."""
    free_s: float | None
    """Predicted seconds of a step if forward ran again in no time; None likewise."""
    compute_s: float
    """Predicted seconds of computing in a step."""
    wire_bytes: float
    """Predicted bytes that a node sends to others in a step, or a rank where there are no nodes."""
    measured_s: float = 0.0
    """Fastest step of the slowest rank."""
    sent_bytes: int = 0
    """Bytes counted as for `wire_bytes`, with headers; 0 where links are not shaped."""
    cpu_s: float = 0.0
    """CPU seconds of all ranks together in a step."""
    race_steps: int = 0
    """Steps of the race that the plan has won; 0 where there was none."""
    race_cost: float = 0.0
    """Time that these took longer than as many steps of the plan that the race began with, in such steps."""
    is_open: bool = False
    """True if predictions leave the race open, so that a long fit has it by default."""

    @property
    def _key(self) -> str:
        steps = replace(Plan.from_json(self.plan), memory_limit_bytes=UNLIMITED, solver="", gap=0.0, notes=())
        return f"{'OSDP' if self.way is None else self.name} {steps.to_json()}"


_Entry: TypeAlias = tuple[str, float | None, Plan, Baseline | None]

WITHOUT_RACE = "OSDP without a race"
"""Name of the plan that a race began with that nobody had misled."""

_MOST_RACED = 60
"""Optimizer steps that a race may take."""


def on_one_rank(
    *,
    model: str,
    baselines: Sequence[Mapping[str, Any]],
    limits: Sequence[tuple[float | None, int]],
    spaces: Mapping[str, Mapping[str, Any]],
    micro_batch_size: int,
    num_micro_batches: int,
    division: Division,
    num_rounds: int,
    node_size: int | None,
    misjudged: Sequence[float] | None,
) -> list[dict[str, Any]]:
    """Profiles, measures the links, plans for every limit, and takes steps in turns; every rank runs this.

    Args:
        model: name of a family.
        baselines: fields of each `Baseline` that may take part under the limits that it fits; of those that are one and
            the same way, the one that is predicted to train most samples in a second.
        limits: factor and bytes of each.
        spaces: fields of the `SearchSpace` of each of OSDP's plans, by name; ``recomputes``: whether all blocks do.
        micro_batch_size: the least that is profiled.
        num_micro_batches: in an optimizer step.
        division: what may be chosen of them.
        num_rounds: timed steps.
        node_size: ranks of a node; None: all are in one.
        misjudged: factors of the seconds of computing and of collectives that OSDP is told, with which it then races;
            beside it are the plans of the same units, by what it was told and by what is so, or, if all factors are 1,
            the plan that it began with. None: no race.

    Returns:
        Fields of an `Entrant` for each limit and competitor.
    """
    with waited_reduce_scatters(), quiet(), after_the_first_steps():
        parameter_bytes = sum(parameter.nbytes for parameter in build(model).parameters())
        cluster = measure_cluster(torch.device("cpu"), node_size=node_size, parameter_bytes=parameter_bytes)
        samples = _profiled(division, micro_batch_size, num_micro_batches)
        exchanges = any(STATIONARY.name in fields.get("modes", ()) for fields in spaces.values())
        profile = partial(profile_model, activations=_RECOMPUTING, exchanges=exchanges, together=in_step)
        profiles = [profile(build(model), build(model).batch(size)) for size in samples]
        policy = _policy(division, micro_batch_size, num_micro_batches)
        plans, entrants = _Plans(build(model), profiles, cluster, policy, spaces), list[Entrant]()
        known = [Baseline(**fields) for fields in baselines]
        for limit, limit_bytes in limits:
            race = None if misjudged is None else _Race(model, plans, misjudged, limit_bytes)
            if dist.get_rank() == 0:
                fitting = [each for each in known if each.counted_bytes <= limit_bytes]
                searched = plans.searched(limit_bytes) if race is None else race.entries()
                entries = [*plans.rivals(fitting, limit), *((name, limit, plan, None) for name, plan in searched)]
                made = [plans.entrant(*entry) for entry in entries]
                entrants += made if race is None else [race.told_of(each) for each in made]
        _give_back()
        return [asdict(entrant) for entrant in _timed(model, entrants, num_rounds)]


def _policy(division: Division, micro_batch_size: int, num_micro_batches: int) -> BatchPolicy:
    if division == "held":
        return BatchPolicy.fixed(micro_batch_size, num_micro_batches)
    if division == "auto":
        return BatchPolicy.divide(micro_batch_size * num_micro_batches)
    return BatchPolicy.scale()


def _profiled(division: Division, micro_batch_size: int, num_micro_batches: int) -> Sequence[int]:
    """Micro-batches to profile: what lies between may be predicted from the nearer one, as the strategy does."""
    if division == "scale":
        return micro_batch_size, _MANY_SAMPLES
    return sorted({micro_batch_size, micro_batch_size * (1 if division == "held" else num_micro_batches)})


class _Plans:
    """Plans for a model on these ranks, as rank 0 sees them."""

    def __init__(
        self,
        module: Family,
        profiles: Sequence[ModelProfile],
        cluster: Cluster,
        policy: BatchPolicy,
        spaces: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._module, self._profiles, self._cluster = module, profiles, cluster
        self._policy, self._spaces = policy, spaces

    def misjudged(self, computing: float, links: float) -> _Plans:
        """Plans as if computing, and collectives, took so many times as long."""
        wrong = Correction(computing=computing, links={"all": links})
        profiles = [wrong.of_profile(each) for each in self._profiles]
        return _Plans(self._module, profiles, wrong.of_cluster(self._cluster), self._policy, self._spaces)

    def rivals(self, fitting: Iterable[Baseline], limit: float | None) -> list[_Entry]:
        """Entries without OSDP that take part under a limit."""
        best: dict[str, tuple[float, _Entry]] = {}
        for baseline in fitting:
            plan = baseline.plan(
                self._module,
                world_size=self._cluster.world_size,
                micro_batch_size=baseline.micro_batch_size,
                num_micro_batches=baseline.num_micro_batches,
                node_size=self._cluster.node_size,
            )
            plan = self._with_bytes(plan, is_sharded=baseline.sharding not in UNSHARDED)
            rate = _num_samples(plan) / self._simulated(plan).time_s
            if baseline.name not in best or rate > best[baseline.name][0]:
                best[baseline.name] = (rate, (baseline.name, limit, plan, baseline))
        return [entry for _, entry in best.values()]

    def searched(self, limit_bytes: int) -> list[tuple[str, Plan]]:
        """OSDP's plans under a limit, by name."""
        return [(name, self._searched(space, limit_bytes)) for name, space in self._spaces.items()]

    def with_best_modes(self, plan: Plan, limit_bytes: int) -> Plan:
        """Plan with the units, slices, blocks and micro-batches of another, with other modes where these are faster."""
        setting, _ = planned_setting(plan, self._nearest(plan), self._cluster)
        ahead = setting.engine.all_ahead
        setting = replace(setting, engine=ahead, least_ahead=ANY_PREFETCH.without_prefetch(ahead))
        found = assign_ahead(setting, memory_limit_bytes=limit_bytes, search="depth_first", worth_s=inf, floor_s=inf)
        assert found is not None  # the other fits
        made = plan_of(found, memory_limit_bytes=limit_bytes, space=plan.search_space)
        return min(self.judged(plan, limit_bytes), made, key=lambda each: each.step_time_s)

    def around(self, plan: Plan) -> list[tuple[str, Plan]]:
        """The plan and those that its module could change to, by name."""
        found = candidates(plan, self._nearest(plan), self._cluster, may_round=True)
        return [(racer.name, racer.plan) for racer in found]

    def is_open(self, plan: Plan) -> bool:
        """True if predictions leave open which of these is the fastest."""
        return are_close(candidates(plan, self._nearest(plan), self._cluster), self._cluster)

    def judged(self, plan: Plan, limit_bytes: int) -> Plan:
        """The plan with these predictions: equal plans are equal then."""
        return judge_plan(plan, self._nearest(plan), self._cluster, memory_limit_bytes=limit_bytes)

    def telling(self, strategy: OSDPStrategy, plan: Plan) -> _Telling:
        """Callback that tells a strategy these numbers for a race."""
        return _Telling(strategy, self._nearest(plan), self._cluster)

    def entrant(self, name: str, limit: float | None, plan: Plan, baseline: Baseline | None) -> Entrant:
        """Entrant of a plan, with what is predicted."""
        estimate = self._simulated(plan)
        is_predicted = baseline is None or baseline.is_predicted
        return Entrant(
            name=name,
            limit=limit,
            way=None if baseline is None else baseline.way,
            plan=replace(plan, memory_limit_bytes=UNLIMITED).to_json(),
            counted_bytes=None if baseline is None else baseline.counted_bytes,
            predicted_bytes=estimate.peak.peak_bytes if is_predicted else None,
            predicted_s=estimate.time_s if is_predicted else None,
            free_s=simulate(plan, _running_again_in_no_time(self._nearest(plan)), self._cluster).time_s
            if is_predicted
            else None,
            compute_s=estimate.compute_s,
            wire_bytes=sent_bytes(plan, scatters_round=baseline is not None and baseline.sharding == "DDP"),
        )

    def _searched(self, space: Mapping[str, Any], limit_bytes: int) -> Plan:
        fields = {**space}
        recomputes = fields.pop("recomputes", False)

        def planned(profile: ModelProfile) -> Plan:
            return make_plan(
                profile,
                self._cluster,
                memory_limit_bytes=limit_bytes,
                micro_batch_size=self._policy,
                search_space=SearchSpace(**fields),
                method=PlanMethod(blocks={block.name: "recompute" for block in profile.blocks} if recomputes else None),
            )

        first = self._profiles[0]
        plan = planned(first)
        nearer = self._nearest(plan)
        return plan if nearer is first else planned(nearer)

    def _simulated(self, plan: Plan) -> StepEstimate:
        return simulate(plan, self._nearest(plan), self._cluster)

    def _nearest(self, plan: Plan) -> ModelProfile:
        """Profile of the micro-batch that is nearest to the plan's."""
        return min(self._profiles, key=lambda each: abs(log(each.profiled_batch_size / plan.micro_batch_size)))

    def _with_bytes(self, plan: Plan, *, is_sharded: bool) -> Plan:
        """Plan with the bytes of its units; what is not sharded all-reduces gradients, and gathers nothing else."""
        step, _ = planned_step(plan, self._profiles[0], self._cluster)
        sizes = {unit.name: (unit.gathered_bytes, unit.gradient_bytes) for unit in step.units}
        units = []
        for unit in plan.units:
            parts = [sizes[name] for name in slice_names(unit.name, unit.num_slices)]
            gathered, reduced = map(sum, zip(*parts, strict=True))
            parameter_bytes = gathered if is_sharded else reduced
            units.append(replace(unit, parameter_bytes=parameter_bytes, gradient_bytes=reduced))
        return replace(plan, units=tuple(units))


def _running_again_in_no_time(profile: ModelProfile) -> ModelProfile:
    blocks = (
        replace(
            block,
            rerun_s=ZERO,
            levels={value: replace(level, rerun_s=ZERO) for value, level in block.levels.items()},
        )
        for block in profile.blocks
    )
    return replace(profile, blocks=tuple(blocks))


class _Race:
    """Race that OSDP's plan has with numbers that it is told; every rank makes it, and rank 0 plans.

    Args:
        model: name of a family.
        plans: by what was measured; all predictions are theirs.
        misjudged: factors of the seconds that OSDP is told.
        limit_bytes: memory limit.
    """

    def __init__(self, model: str, plans: _Plans, misjudged: Sequence[float], limit_bytes: int) -> None:
        self._model, self._plans, self._limit_bytes = model, plans, limit_bytes
        self._is_misled = {*misjudged} != {1.0}
        self._told = plans.misjudged(*misjudged)
        found: list[Any] = [self._told.searched(limit_bytes) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, src=0)
        ((self._name, self._first),) = found[0]
        first = self._first
        self._strategy = OSDPStrategy(plan=first, batch_size="keep", node_size=first.node_size, race=True)
        self._watch = self._told.telling(self._strategy, first)
        callbacks = [self._watch]
        train(build(model), first, num_steps=_MOST_RACED, callbacks=callbacks, strategy=self._strategy)

    def entries(self) -> Iterator[tuple[str, Plan]]:
        """Yields OSDP's plan after the race, and what it is compared with, by name; on rank 0."""
        won, first = self._strategy.plan, self._first
        assert won is not None
        racers = self._told.around(first)
        if len(racers) > 1 and not any("won the race" in note for note in won.notes):
            raise RuntimeError(f"Expected a race of {len(racers)} plans of {self._model}, which no plan has won.")
        others = [(WITHOUT_RACE, first)]
        if self._is_misled:
            others = [(f"{other}, misjudged", plan) for other, plan in racers]
            others += self._plans.around(self._plans.with_best_modes(first, self._limit_bytes))
        for each, plan in ((self._name, won), *others):
            yield each, self._plans.judged(plan, self._limit_bytes)

    def told_of(self, entrant: Entrant) -> Entrant:
        """Entrant with what its race took, if it has won it."""
        if entrant.name != self._name:
            return entrant
        steps, cost = self._watch.taken()
        return replace(entrant, race_steps=steps, race_cost=cost, is_open=self._told.is_open(self._first))


class _Telling(pl.Callback):
    """Callback that has a fit under a given plan race as if it had measured these numbers, and ends it after that."""

    reads_parameters = False

    def __init__(self, strategy: OSDPStrategy, profile: ModelProfile, cluster: Cluster) -> None:
        self._strategy, self._profile, self._cluster = strategy, profile, cluster
        self._ends_s: list[float] = []
        self._racers: list[int | None] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        units = self._strategy._units
        units.choice = units.choice._replace(profile=self._profile, cluster=self._cluster)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > len(self._ends_s):  # else gradients accumulate
            self._ends_s.append(time.perf_counter())
            self._racers.append(self._strategy.racer)
        trainer.should_stop = not self._strategy.is_racing

    def taken(self) -> tuple[int, float]:
        """Steps of the race, and the time that they took longer than usual ones, in usual steps."""
        seconds = [later - earlier for earlier, later in pairwise(self._ends_s)][WARM_UP_STEPS - 1 :]
        racers = pairwise(self._racers[WARM_UP_STEPS - 1 :])
        usual = [each for each, pair in zip(seconds, racers, strict=True) if pair == (1, 1)]
        return (len(seconds), sum(seconds) / fmean(usual) - len(seconds)) if usual else (0, 0.0)


def _num_samples(plan: Plan) -> int:
    return plan.micro_batch_size * plan.num_micro_batches


def _timed(model: str, entrants: Sequence[Entrant], num_rounds: int) -> list[Entrant]:
    """Entrants of rank 0, on every rank, with the seconds of their steps; equal plans are run once."""
    shared: list[Any] = [entrants]
    dist.broadcast_object_list(shared, src=0)
    entrants = shared[0]
    fits = {each._key: partial(_fit, model, each, num_steps=1 + num_rounds) for each in entrants}
    steps = fits_in_turns(fits, num_rounds=num_rounds)
    fastest, cpu_s = fastest_of_slowest(seconds_of(steps)), cpu_seconds(steps)
    return [
        replace(
            each,
            measured_s=fastest[each._key],
            sent_bytes=min(step.sent_bytes for step in steps[each._key]),
            cpu_s=cpu_s[each._key],
        )
        for each in entrants
    ]


def _fit(model: str, entrant: Entrant, turns: Turns, *, num_steps: int) -> None:
    module = build(model)
    plan = Plan.from_json(entrant.plan)
    strategy = None if entrant.way is None else entrant.way.strategy(module, node_size=plan.node_size)
    train(module, plan, num_steps=num_steps, callbacks=[turns], strategy=strategy)


def _give_back() -> None:
    """Gives back what profiling took and has freed: the fits of all that take part need all there is."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@contextmanager
def after_the_first_steps() -> Iterator[None]:
    """Leaves out, within the context, what OSDP does in the first steps of every fit only, and which slows them.

    On CPU it counts live bytes in three steps; ranks tell each other every collective before it in two: here in the
    first, which is not timed.
    """
    with (
        patch("lightning_osdp.callbacks.peak.COUNTED_STEPS", 0),
        patch("lightning_osdp.apply.ranks.agreement._NUM_CHECKED", 1),
    ):
        yield
