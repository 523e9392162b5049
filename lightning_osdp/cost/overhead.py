"""Time that the runtime takes for a unit beside its collectives and its operators."""

from __future__ import annotations

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.core.workload import Workload
from lightning_osdp.cost.cost import Cost
from lightning_osdp.engine import DEFAULT, Engine


def overhead_cost(
    unit: UnitProfile, mode: ShardingMode, *, cluster: Cluster, workload: Workload, engine: Engine = DEFAULT
) -> Cost:
    """Seconds of hooks, views and copies in one optimizer step, as measured on the cluster; none where it was not.

    With G all-gathers and R reduce-scatters in K micro-batches:

        t = G gather + K flatten + R reduce + (K - R) accumulate

    The paper has no such term. [Empirical, measured by `profiler.measure_unit_overhead` in every run.]
    """
    num_micro_batches = workload.num_micro_batches
    num_reduces = engine.num_reduce_scatters(mode, num_micro_batches=num_micro_batches)
    counts = {
        "gather": engine.num_all_gathers(mode, unit, num_micro_batches=num_micro_batches),
        "flatten": num_micro_batches,
        "reduce": num_reduces,
        "accumulate": num_micro_batches - num_reduces,
    }
    return Cost(time_s=sum(count * overhead_s(unit, part, cluster) for part, count in counts.items()))


def overhead_s(unit: UnitProfile, part: str, cluster: Cluster) -> float:
    """Seconds of one part of `Cluster.unit_overhead`, once; one rank shards nothing."""
    overhead = cluster.unit_overhead.get(part)
    if overhead is None or not unit.operators or cluster.world_size == 1:
        return 0.0
    return overhead.seconds(unit.gathered_bytes, max(1, len(unit.parameters)))
