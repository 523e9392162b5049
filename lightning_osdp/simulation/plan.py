"""A plan as what the simulator goes through."""

from __future__ import annotations

from dataclasses import replace

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import MODES, ShardingMode
from lightning_osdp.core.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile, grouped
from lightning_osdp.cost import Workload
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.simulation.step import StepEstimate, simulate_step


def simulate(plan: Plan, profile: ModelProfile, cluster: Cluster) -> StepEstimate:
    """Time and memory of one optimizer step under a plan.

    Args:
        plan: the units, their modes, the workload and the prefetch settings.
        profile: of the model that the plan is for.
        cluster: ranks and links; its number of ranks must be the plan's.

    Raises:
        PlanMismatchError: the plan is for another model or another number of ranks.
        ConfigurationError: a unit has several slices, which are not simulated yet.
    """
    plan.check_matches(profile.fingerprint, world_size=cluster.world_size)
    units, modes = planned_units(plan, profile)
    return simulate_step(
        profile,
        units,
        modes,
        cluster,
        Workload(micro_batch_size=plan.micro_batch_size, num_micro_batches=plan.num_micro_batches),
        backward_prefetch=plan.backward_prefetch,
        forward_prefetch=plan.forward_prefetch,
    )


def planned_units(plan: Plan, profile: ModelProfile) -> tuple[tuple[UnitProfile, ...], tuple[ShardingMode, ...]]:
    """The units of a plan, and their modes.

    Raises:
        ConfigurationError: a unit has several slices.
    """
    for unit in plan.units:
        if unit.num_slices > 1:
            raise ConfigurationError(
                f"Expected units of one slice, got {unit.num_slices} slices in unit {unit.name!r}: they cannot be"
                " simulated yet. Simulate a plan without slices."
            )
    modes = {unit.name: replace(MODES[unit.modes[0]], sync=unit.sync) for unit in plan.units}
    units = grouped(profile, {unit.name: unit.operators for unit in plan.units})
    return units, tuple(modes[unit.name] for unit in units)
