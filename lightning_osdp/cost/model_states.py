"""Memory of parameters, gradients and optimizer state, as the search adds it up."""

from __future__ import annotations

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.core.workload import Workload
from lightning_osdp.cost.cost import Cost
from lightning_osdp.engine import DEFAULT, Engine


def model_states_cost(
    unit: UnitProfile, mode: ShardingMode, *, cluster: Cluster, workload: Workload, engine: Engine = DEFAULT
) -> Cost:
    """Bytes of the unit's model states on one rank.

        m_ZDP = (parameters + gradients + optimizer) / N
        m_DP  = parameters + (gradients + optimizer) / N

    The paper's text has everything of a DP operator whole; its code, and FSDP's ``SHARD_GRAD_OP``, keep only the
    parameter whole.

    References:
        OSDP (Jiang et al. 2022), appendix B (profiler), with the deviation above.
    """
    del workload, engine
    sharded = unit.trainable_bytes + unit.optimizer_bytes
    whole = 0
    if mode.resident:
        whole = unit.gathered_bytes
    else:
        sharded += unit.parameter_bytes
    return Cost(memory_bytes=whole + sharded / cluster.world_size)
