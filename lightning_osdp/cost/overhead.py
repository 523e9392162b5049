"""Time that the runtime takes for a unit beside its collectives and its operators."""

from __future__ import annotations

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost.cost import Cost, Workload


def overhead_cost(unit: UnitProfile, mode: ShardingMode, *, cluster: Cluster, workload: Workload) -> Cost:
    """Seconds of hooks, views and copies in one optimizer step, as measured on the cluster; none where it was not.

    The paper has no such term. [Empirical, measured by `profiler.measure_unit_overhead` in every run.]
    """
    return Cost(time_s=workload.num_micro_batches * overhead_s(unit, mode, cluster))


def overhead_s(unit: UnitProfile, mode: ShardingMode, cluster: Cluster) -> float:
    """The same of one micro-batch."""
    overhead = cluster.unit_overhead.get(mode.name)
    return 0.0 if overhead is None or not unit.operators else overhead.seconds(unit.gathered_bytes)
