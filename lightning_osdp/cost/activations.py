"""Memory of what forward saves for backward."""

from __future__ import annotations

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost.cost import Cost, Workload


def activations_cost(unit: UnitProfile, mode: ShardingMode, *, cluster: Cluster, workload: Workload) -> Cost:
    """Bytes saved for backward at the micro-batch in hand; the same in every mode."""
    del mode, cluster
    return Cost(memory_bytes=unit.saved_bytes.at(workload.micro_batch_size))
