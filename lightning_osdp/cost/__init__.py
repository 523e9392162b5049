"""The cost model: pure functions from (unit, mode, cluster, workload) to `Cost`, one file per term.

`TERMS` lists the additive terms; their sum is what the search sees. `step_memory` is the closed form of the peak for
any choice of modes. What happens in a step, and how many bytes live meanwhile, is asked of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.core.workload import Workload
from lightning_osdp.cost.activations import activations_cost, activations_s, block_s, copied_s, saved_bytes
from lightning_osdp.cost.besides import evaluation_peak, saving_peak
from lightning_osdp.cost.communication import communication_cost, gather_s, reduce_s
from lightning_osdp.cost.compute import compute_cost, optimizer_s
from lightning_osdp.cost.cost import Cost
from lightning_osdp.cost.model_states import model_states_cost
from lightning_osdp.cost.overhead import overhead_cost, overhead_s
from lightning_osdp.cost.paper import TIME_TERMS as PAPER_TIME_TERMS
from lightning_osdp.cost.paper import paper_memory
from lightning_osdp.cost.peak_memory import Held, PeakMemory, StepMemory, exact_peak, step_memory
from lightning_osdp.engine import DEFAULT, Engine, Moment

TERMS: dict[str, Callable[..., Cost]] = {
    "communication": communication_cost,
    "compute": compute_cost,
    "overhead": overhead_cost,
    "model_states": model_states_cost,
    "activations": activations_cost,
}
"""Additive terms by name."""


def unit_cost(
    unit: UnitProfile,
    mode: ShardingMode,
    *,
    cluster: Cluster,
    workload: Workload,
    engine: Engine = DEFAULT,
    terms: Iterable[str] = TERMS,
) -> Cost:
    """Sum of these `TERMS` for one unit in one mode."""
    total = Cost()
    for name in terms:
        total += TERMS[name](unit, mode, cluster=cluster, workload=workload, engine=engine)
    return total


__all__ = [
    "PAPER_TIME_TERMS",
    "TERMS",
    "Cost",
    "Held",
    "Moment",
    "PeakMemory",
    "StepMemory",
    "Workload",
    "activations_s",
    "block_s",
    "copied_s",
    "evaluation_peak",
    "exact_peak",
    "gather_s",
    "optimizer_s",
    "overhead_cost",
    "overhead_s",
    "paper_memory",
    "reduce_s",
    "saved_bytes",
    "saving_peak",
    "step_memory",
    "unit_cost",
]
