"""Planning: a plan is made from a profile and a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_osdp.core.axes import KEEP, STATIONARY
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.document import shown
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.plans.plan import COST_MODELS, Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.progress import Progress, silent
from lightning_osdp.core.units import partition
from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planner.assign import Decided, Modes, Setting, assignment_of
from lightning_osdp.planner.cost import unit_s
from lightning_osdp.planner.engine import AUTO, FSDP2, effects_of, engine_of
from lightning_osdp.planner.scheduler.competition import Competition
from lightning_osdp.planner.scheduler.infeasible import why_host_lacks, why_infeasible
from lightning_osdp.planner.scheduler.planned import plan_of
from lightning_osdp.planner.scheduler.structures import Bound
from lightning_osdp.planner.scheduler.sweep import Candidate, Sweep
from lightning_osdp.planner.search import SOLVERS
from lightning_osdp.planner.simulation import planned_activations, planned_step, simulate

ANY_PREFETCH = FSDP2(backward_prefetch=AUTO, forward_prefetch=AUTO)
"""Engine whose settings of prefetching are all to be chosen."""
WORTH_MOVING_ACTIVATIONS = 0.2
"""Fraction of the seconds of a step that operators must save that move activations where nobody has named that: steps
of many small collectives have taken up to 1.6 times as long as was predicted."""
LEAST_SAVED_S = 0.1
"""Seconds of a step that they must save besides: hosts agree before each exchange, and those that are busy come tens of
milliseconds later; links that are measured meanwhile seem slow."""


@dataclass(frozen=True, kw_only=True)
class PlanMethod:
    """Method by which plans are searched and judged.

    Raises:
        ConfigurationError: no such solver or cost model.
    """

    search: str = "depth_first"
    """Name of a solver: ``depth_first``, ``greedy`` or ``exhaustive``."""
    cost_model: str = "simulate"
    """Cost that plans are judged by: ``simulate``, a step as ``fully_shard`` runs it, or ``paper``, the sums of
    equation 1 over operators."""
    blocks: Mapping[str, str] | None = None
    """Block -> what it does with what it saves, where that is not to be chosen; blocks without a name here keep it."""

    def __post_init__(self) -> None:
        if self.search not in SOLVERS:
            raise ConfigurationError(f"search must be one of {tuple(SOLVERS)}, got {self.search!r}.")
        if self.cost_model not in COST_MODELS:
            raise ConfigurationError(f"cost_model must be one of {COST_MODELS}, got {self.cost_model!r}.")


def method_of(plan: Plan) -> PlanMethod:
    """Method by which a plan was searched and judged; with the default solver where the plan was not searched."""
    return PlanMethod(
        search=plan.solver or PlanMethod().search, cost_model=plan.cost_model, blocks=plan.given_blocks or None
    )


def make_plan(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    memory_limit_bytes: int,
    host_limit_bytes: int | None = None,
    micro_batch_size: int | BatchPolicy,
    search_space: SearchSpace | None = None,
    method: PlanMethod | None = None,
    engine: FSDP2 = ANY_PREFETCH,
    progress: Progress = silent,
) -> Plan:
    """The plan with the best predicted samples/s under the limits of memory.

    Where the fastest plan takes more memory of the host than there may be, the search begins anew, and places states
    and shards there, and what blocks copy, as far as there is room. The bound is then of plans with all the memory of
    the host that they like, where each byte takes the seconds that it is worth: under a limit of B bytes no step takes
    less than theirs, less the seconds of B bytes (Lagrange). Updates on the host are priced as if they waited for
    backward; `simulate` tells what backward hides of them.

    Where no modes are named, operators by themselves may move activations, too, if that is predicted to
    save a fifth of the seconds for a sample, and 0.1 s of a step; where a tenth of the model or less is
    trained in a plain step, trained units may be replicated.

    Args:
        profile: the model, see `profile_model`.
        cluster: ranks and links, see `measure_cluster`.
        memory_limit_bytes: most bytes of live tensors on one rank, in every phase of a step.
        host_limit_bytes: most memory of the host that a rank takes for states, shards and what blocks offload; None:
            what is free there by ``cluster``.
        micro_batch_size: samples per rank and micro-batch, of which an optimizer step has one; else a `BatchPolicy`
            says how many it has, or what may be chosen.
        search_space: what may be chosen; None: the defaults of `SearchSpace`.
        method: solver and cost model; None: `PlanMethod`'s defaults.
        engine: settings of prefetching, which decide when units are gathered, and how many at once; those that are
            ``"auto"`` are chosen.
        progress: called with each micro-batch size that is tried, and the best samples/s so far.

    Raises:
        ConfigurationError: no such block, a number of samples below 1, a limit below 1 or of 2^63 bytes or more, or all
            states are to be on the host, which cannot update them or was not profiled.
        InfeasibleError: no plan fits; the text says what would.
    """
    if not 1 <= memory_limit_bytes < 2**63:
        raise ConfigurationError(
            f"memory_limit_bytes must be at least 1 and less than 2^63, got {shown(memory_limit_bytes)}."
        )
    space, method = search_space or SearchSpace(), method or PlanMethod()
    if "device" not in space.states and (method.cost_model == "paper" or profile.optimizer.host_s_per_element is None):
        raise ConfigurationError(
            "Expected states that can all be on the host, for cpu_offload=True or SearchSpace(states=('host',)): those"
            " of an optimizer of torch.optim but Adagrad, without capturable=True or differentiable=True, without a"
            " weight average on the device, and not with cost_model='paper'. Offer the device, too, as in"
            " SearchSpace(states=('device', 'host')), or leave both out."
        )
    profile = profile.with_updates(ahead=False)
    policy = micro_batch_size if isinstance(micro_batch_size, BatchPolicy) else BatchPolicy.fixed(micro_batch_size)
    searched = partial(
        _searched,
        cluster=cluster,
        memory_limit_bytes=memory_limit_bytes,
        policy=policy,
        method=method,
        engine=engine,
        host_limit_bytes=host_limit_bytes,
        progress=progress,
    )
    offered = space.unasked(profile)
    plan = _named(searched(space.of(profile), offered), space)
    moved = moving_operators(plan, profile, cluster) if space.modes is None else None
    if moved is None or not _is_worth_it(plan, 1 - simulate(moved, profile, cluster).time_s / plan.step_time_s):
        return plan
    alone = tuple(each for each in profile.exchanges if len(each.operators) == 1)
    other = searched(
        dataclasses.replace(profile, exchanges=alone),
        offered.offering(STATIONARY.name),
    )
    is_worth_it = _is_worth_it(plan, 1 - plan.samples_per_s / other.samples_per_s)
    return _named(other, space) if is_worth_it else plan


def _named(plan: Plan, space: SearchSpace) -> Plan:
    """The plan with the modes that were named in place of those that were offered."""
    return dataclasses.replace(plan, search_space=dataclasses.replace(plan.search_space, modes=space.modes))


def _is_worth_it(plan: Plan, saved: float) -> bool:
    """Tells if activations may move unasked to save this fraction of the seconds of a plan."""
    return saved >= WORTH_MOVING_ACTIVATIONS and saved * plan.step_time_s >= LEAST_SAVED_S


def moving_operators(plan: Plan, profile: ModelProfile, cluster: Cluster) -> Plan | None:
    """Plan with operators in units of their own that move activations, where that takes less than moving weights.

    Units that move activations already stay as they are. Nothing is predicted of the plan. None where there are no such
    operators. Arguments as of `judge_plan`.
    """
    if plan.cost_model == "paper":
        return None
    step, _ = planned_step(plan, profile, cluster)
    gathered = {
        name: unit.treatments[0]
        for unit in plan.units
        if not effects_of(unit.treatments[0]).exchanges
        for name in unit.operators
    }
    given: dict[str, Any] = {"cluster": cluster, "workload": step.workload, "engine": engine_of(plan)}
    moved = [
        Unit(
            name=unit.name,
            operators=(unit.name,),
            kind=unit.kind,
            treatments=(STATIONARY,),
            exchange=unit.exchange.kind,
        )
        for unit in partition(step.profile, min_unit_bytes=plan.search_space.min_unit_bytes)
        if unit.exchange is not None
        and unit.name in gathered
        and unit_s(unit, STATIONARY, **given) < unit_s(unit, gathered[unit.name], **given)
    ]
    names = {unit.name for unit in moved}
    return dataclasses.replace(plan, units=(*_without(plan.units, names), *moved)) if moved else None


def _without(units: Sequence[Unit], operators: Collection[str]) -> Iterator[Unit]:
    """Units without these operators, which are modules."""
    for unit in units:
        left = tuple(name for name in unit.operators if name not in operators)
        modules = tuple(name for name in unit.modules if name not in operators)
        if left == unit.operators:
            yield unit
        elif left or not unit.name:
            yield dataclasses.replace(
                unit,
                name=modules[0] if modules else unit.name,
                operators=left,
                modules=modules if len(modules) > 1 else (),
            )


def _searched(
    profile: ModelProfile,
    space: SearchSpace,
    *,
    cluster: Cluster,
    memory_limit_bytes: int,
    policy: BatchPolicy,
    method: PlanMethod,
    engine: FSDP2,
    host_limit_bytes: int | None,
    progress: Progress,
) -> Plan:
    """The best plan in exactly this space; arguments as of `make_plan`."""
    smallest = min(policy.micro_batch_sizes, default=1)
    first = Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=space.min_unit_bytes),
        cluster=cluster,
        workload=policy.workload(smallest),
        modes=space.treatments,
        engine=engine,
        cost_model=method.cost_model,
    )
    if method.blocks is not None:
        first = first.with_blocks(method.blocks)
        space = dataclasses.replace(space, activations=(KEEP,))
    if host_limit_bytes is None:
        host_limit_bytes = cluster.host_memory_bytes

    def sweep_in(host_room_bytes: int | None, *, given: Setting = first) -> Sweep:
        return Sweep(
            [
                dataclasses.replace(
                    given, engine=each, least_ahead=engine.without_prefetch(each), host_room_bytes=host_room_bytes
                )
                for each in engine.alternatives(
                    overlaps=first.overlaps and "gather" not in cluster.waits_for,
                    has_streams=cluster.has_streams and cluster.world_size > 1,  # one rank sends nothing
                )
            ],
            Competition(memory_limit_bytes=memory_limit_bytes, search=method.search, space=space),
            policy=policy,
            progress=progress,
        )

    sweep = sweep_in(None)
    best = sweep.best()
    if best is None:
        raise InfeasibleError(why_infeasible(sweep, smallest, host_limit_bytes))
    most_samples_per_s, needed_bytes = sweep.most_samples_per_s(), best.host_bytes
    if host_limit_bytes is None or needed_bytes <= host_limit_bytes:
        return _plan(best, sweep, most_samples_per_s, host_limit_bytes)
    within = sweep_in(host_limit_bytes)
    found = within.best() if "device" in {*space.states} & {*space.shards} else None
    if found is None or found.host_bytes > host_limit_bytes:
        raise InfeasibleError(why_host_lacks(sweep, smallest, host_limit_bytes, needed_bytes))
    lost_s = found.assignment.step_time_s * (1 - found.samples_per_s / best.samples_per_s)
    if lost_s > 0 and needed_bytes > found.host_bytes:
        rent_s = lost_s / (needed_bytes - found.host_bytes)
        renting = sweep_in(None, given=dataclasses.replace(first, host_rent_s_per_byte=rent_s))
        renting.best()
        most_samples_per_s = min(most_samples_per_s, renting.most_samples_per_s(rent_s * host_limit_bytes))
    return _plan(found, within, most_samples_per_s, host_limit_bytes)


def judge_plan(
    plan: Plan,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    memory_limit_bytes: int,
    host_limit_bytes: int | None = None,
) -> Plan:
    """A plan that is there, as it is predicted of this profile and cluster; nothing of it is chosen anew.

    Its gap stays that of the search that found it.

    Args:
        plan: for as many ranks.
        profile: of its model.
        cluster: ranks and links.
        memory_limit_bytes: most bytes of live tensors on one rank; the plan may need more.
        host_limit_bytes: likewise of the host's memory.

    Raises:
        PlanMismatchError: the plan is for another model or another number of ranks.
        ConfigurationError: it has operators, slices or blocks that the model has not.
    """
    setting, modes = planned_setting(plan, profile, cluster)
    profile, space, method = setting.unchanged, plan.search_space, method_of(plan)
    assigned = assignment_of(setting, modes, bound_s=setting.costs.step_time_s(modes) / (1 + plan.gap))
    plain = dataclasses.replace(
        setting,
        profile=profile,
        units=partition(profile, min_unit_bytes=space.min_unit_bytes),
        engine=setting.engine.all_ahead,
        decided=Decided(),
    )
    sweep = Sweep(
        [plain if method.blocks is None else plain.with_blocks(method.blocks)],
        Competition(memory_limit_bytes=memory_limit_bytes, search=method.search, space=space),
        policy=BatchPolicy.fixed(plan.micro_batch_size, plan.num_micro_batches),
        progress=silent,
    )
    judged = Candidate(assignment=assigned, bounds=(Bound(setting, assigned.bound_s),))
    found = _plan(judged, sweep, judged.most_samples_per_s, host_limit_bytes)
    return dataclasses.replace(found, solver=plan.solver)


def planned_setting(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Setting, Modes]:
    """The setting of a plan that is there, with what the plan has decided, and the modes of its units.

    Raises:
        PlanMismatchError: the plan is for another model or another number of ranks.
        ConfigurationError: it has operators, slices or blocks that the model has not.
    """
    plan.check_matches(profile.fingerprint, world_size=cluster.world_size, node_size=cluster.node_size)
    offered = plan.offered(profile)
    profile = offered.of(profile)
    step, modes = planned_step(plan, profile, cluster)
    setting = Setting(
        profile=step.profile,
        units=step.units,
        cluster=cluster,
        workload=step.workload,
        modes=offered.treatments,
        engine=engine_of(plan),
        cost_model=plan.cost_model,
        decided=Decided(
            profile=profile,
            blocks=planned_activations(plan, profile),
            num_slices={unit.name: unit.num_slices for unit in plan.units if unit.num_slices > 1},
        ),
    )
    return setting, modes


def _plan(best: Candidate, sweep: Sweep, most_samples_per_s: float, host_limit_bytes: int | None) -> Plan:
    assignment, setting = best.assignment, best.assignment.setting
    memory_limit_bytes, space = sweep.competition.memory_limit_bytes, sweep.competition.space
    plain, plain_modes = sweep.plain(best)
    plain_peak_bytes = plain.costs.exact_peak_bytes(plain_modes)
    ratio = setting.workload.num_samples / plain.workload.num_samples if plain_peak_bytes <= memory_limit_bytes else 0.0
    return plan_of(
        assignment,
        memory_limit_bytes=memory_limit_bytes,
        space=space,
        host_limit_bytes=host_limit_bytes,
        most_samples_per_s=most_samples_per_s,
        solver=sweep.competition.search,
        all_zdp_step_time_s=ratio * plain.costs.step_time_s(plain_modes),
        all_zdp_peak_bytes=plain_peak_bytes,
        all_zdp_how=_how(plain, plain_modes, setting),
    )


def _how(plain: Setting, modes: Modes, setting: Setting) -> str:
    """Differences of plain FSDP from what one would have without choosing."""
    workload, num_micro_batches = plain.workload, plain.workload.num_micro_batches
    told = []
    if workload != setting.workload:
        times = f" x {num_micro_batches}" if num_micro_batches > 1 else ""
        told.append(f"micro-batches of {workload.micro_batch_size}{times}")
    if plain.decided.blocks:
        told.append("all blocks recomputing")
    if num_micro_batches > 1:
        last = any(effects_of(mode).waits for mode in modes)
        told.append(f"gradients reduced in {'the last' if last else 'every'} micro-batch")
    return ", ".join(told)
