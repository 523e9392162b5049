"""What a plan is predicted to hold at each moment of a step of the model that it was made for."""

from __future__ import annotations

from lightning_osdp.core.modes import MODES
from lightning_osdp.core.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import grouped
from lightning_osdp.cost.cost import Workload
from lightning_osdp.cost.moments import Moment
from lightning_osdp.cost.peak_memory import memory_over_step


def planned_memory(plan: Plan, profile: ModelProfile) -> tuple[Moment, ...]:
    """All moments of one optimizer step under a plan, in order; none where one of its units has several slices.

    Args:
        plan: the modes, and the units that have them.
        profile: of the same model.
    """
    if any(unit.num_slices > 1 for unit in plan.units):
        return ()
    modes = {unit.name: MODES[unit.modes[0]] for unit in plan.units}
    units = grouped(profile, {unit.name: unit.operators for unit in plan.units})
    return memory_over_step(
        profile,
        units,
        [modes[unit.name] for unit in units],
        world_size=plan.world_size,
        workload=Workload(micro_batch_size=plan.micro_batch_size, num_micro_batches=plan.num_micro_batches),
        backward_prefetch=plan.backward_prefetch,
        forward_prefetch=plan.forward_prefetch,
    )
