"""A plan as what the simulator goes through."""

from __future__ import annotations

import dataclasses

from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.slices import slice_names, split_operators
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import grouped
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.cost import Workload, host_bytes_ahead
from lightning_osdp.planner.engine import effects_of, engine_of, with_activations
from lightning_osdp.planner.simulation.step import StepEstimate, simulate_step


def simulate(plan: Plan, profile: ModelProfile, cluster: Cluster) -> StepEstimate:
    """Time and memory of one optimizer step under a plan.

    Args:
        plan: units, their modes, micro-batches and prefetching.
        profile: of the model that the plan is for, without slices.
        cluster: ranks and links; its number of ranks must be the plan's.

    Raises:
        PlanMismatchError: the plan is for another model or another number of ranks.
        ConfigurationError: an operator has more slices than it can have.
    """
    plan.check_matches(profile.fingerprint, world_size=cluster.world_size, node_size=cluster.node_size)
    return simulate_step(*planned_step(plan, profile, cluster), engine=engine_of(plan))


def planned_step(plan: Plan, profile: ModelProfile, cluster: Cluster) -> tuple[Step, tuple[Treatment, ...]]:
    """The step that a plan is for, with blocks and slices as planned, and the modes of its units.

    Updates on the host begin in backward only if there is room for copies of all states there.

    Raises:
        ConfigurationError: an operator has more slices than it can have, a block does what was not profiled, a unit has
            operators that the model has not, or is updated on the host, which was not profiled.
    """
    _check_names(plan, profile)
    _check_host(plan, profile)
    profile = with_activations(profile, planned_activations(plan, profile))
    num_slices = {unit.name: unit.num_slices for unit in plan.units}
    profile = split_operators(profile, num_slices, slice_s=cluster.slice_s)
    operators: dict[str, tuple[str, ...]] = {}
    modes: dict[str, Treatment] = {}
    for unit in plan.units:
        for name, mode in zip(slice_names(unit.name, unit.num_slices), unit.treatments, strict=True):
            operators[name] = unit.operators if unit.num_slices == 1 else (name,)
            modes[name] = mode
    units = grouped(profile, operators, {unit.name: unit.modules for unit in plan.units if unit.modules})
    read = {unit.name for unit in plan.units if unit.is_read}  # a plan by hand has backward gather all
    units = tuple(dataclasses.replace(unit, is_read=True) if unit.name in read else unit for unit in units)
    workload = Workload(micro_batch_size=plan.micro_batch_size, num_micro_batches=plan.num_micro_batches)
    step = Step(profile=profile, units=units, cluster=cluster, workload=workload)
    chosen = tuple(modes[unit.name] for unit in units)
    if plan.host_limit_bytes is not None and host_bytes_ahead(step, chosen) > plan.host_limit_bytes:
        step = dataclasses.replace(step, profile=profile.with_updates(ahead=False))
    return step, chosen


def planned_activations(plan: Plan, profile: ModelProfile) -> dict[str, str]:
    """Block -> value of ``saves`` in this profile, in which a level that keeps the same may have another number.

    Raises:
        ConfigurationError: a block keeps results that are those of no level in the profile.
    """
    levels = {block.name: {level.kept: value for value, level in block.levels.items()} for block in profile.blocks}
    found = {}
    for block in plan.blocks:
        known = levels.get(block.name, {})
        if block.kept and block.kept not in known:
            raise ConfigurationError(
                f"Expected block {block.name!r} to keep results {[*map(list, known)]} of heavy operations, as was"
                f" profiled, got {[*block.kept]}. Profile with activations=('keep', 'recompute', 'selective')."
            )
        found[block.name] = known[block.kept] if block.kept else block.activations
    return found


def _check_host(plan: Plan, profile: ModelProfile) -> None:
    if profile.optimizer.host_s_per_element is not None:
        return
    hosted = [unit.name for unit in plan.units if any(effects_of(each).updates_on_host for each in unit.treatments)]
    if hosted:
        raise ConfigurationError(
            "Expected a profile with the seconds of updates on the host, for a plan in which the host updates unit"
            f" {hosted[0]!r}, got one without. Profile with on_host=True, which"
            ' OSDPStrategy(search_space=SearchSpace(states=("device", "host"))) does.'
        )


def _check_names(plan: Plan, profile: ModelProfile) -> None:
    known = {operator.name for operator in profile}
    for unit in plan.units:
        missing = [name for name in unit.operators if name not in known]
        if missing:
            raise ConfigurationError(
                f"Expected operators of the profiled model in unit {unit.name!r}, got {missing[0]!r}. Plan anew."
            )
        if unit.num_slices > 1 and unit.operators != (unit.name,):
            raise ConfigurationError(
                f"Expected one operator in a unit with {unit.num_slices} slices, got {len(unit.operators)} in"
                f" {unit.name!r}. Plan anew."
            )
