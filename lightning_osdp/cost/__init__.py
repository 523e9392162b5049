"""The cost model: pure functions from (unit, mode, cluster, workload) to `Cost`, one file per term.

`TERMS` lists the additive terms; their sum is what the search sees. `peak_memory` is the closed form of what one
optimizer step really takes, which no sum over units can express.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost.activations import activations_cost
from lightning_osdp.cost.communication import communication_cost
from lightning_osdp.cost.compute import compute_cost
from lightning_osdp.cost.cost import Cost, Workload
from lightning_osdp.cost.model_states import model_states_cost
from lightning_osdp.cost.moments import Moment
from lightning_osdp.cost.overhead import overhead_cost
from lightning_osdp.cost.peak_memory import (
    PeakMemory,
    StepMemory,
    largest_transient_bytes,
    memory_over_step,
    peak_memory,
    step_memory,
)
from lightning_osdp.cost.planned_memory import planned_memory

TERMS: dict[str, Callable[..., Cost]] = {
    "communication": communication_cost,
    "compute": compute_cost,
    "overhead": overhead_cost,
    "model_states": model_states_cost,
    "activations": activations_cost,
}
"""Additive terms by name."""


def unit_cost(unit: UnitProfile, mode: ShardingMode, *, cluster: Cluster, workload: Workload) -> Cost:
    """Sum of all `TERMS` for one unit in one mode."""
    total = Cost()
    for term in TERMS.values():
        total += term(unit, mode, cluster=cluster, workload=workload)
    return total


__all__ = [
    "TERMS",
    "Cost",
    "Moment",
    "PeakMemory",
    "StepMemory",
    "Workload",
    "largest_transient_bytes",
    "memory_over_step",
    "peak_memory",
    "planned_memory",
    "step_memory",
    "unit_cost",
]
