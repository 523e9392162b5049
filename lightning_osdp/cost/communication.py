"""Time of a unit's collectives: the alpha and beta terms of the paper's equation 2."""

from __future__ import annotations

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.core.workload import Workload
from lightning_osdp.cost.cost import Cost
from lightning_osdp.engine import DEFAULT, Engine


def communication_cost(
    unit: UnitProfile, mode: ShardingMode, *, cluster: Cluster, workload: Workload, engine: Engine = DEFAULT
) -> Cost:
    """Seconds of all-gathers and reduce-scatters in one optimizer step.

    Equation 2, with alpha and beta of each collective apart, for each of K micro-batches that reduces gradients:

        t_ZDP = 2 AG(S) + RS(S) = 3 (N-1) alpha + 3 (N-1)/N S beta    where both collectives cost the same
        t_DP  = 1 AG(S) + RS(S) = 2 (N-1) alpha + 2 (N-1)/N S beta

    Where only the last one reduces them, a step takes 2 K AG(S) + RS(S) of a ZDP unit and AG(S) + RS(S) of a DP one.

    How many collectives there are where forward calls a module again, or backward runs a block again, and how many
    bytes they carry, is the engine's.

    Frozen parameters have no gradient: a unit without trainable parameters reduces nothing.

    References:
        OSDP (Jiang et al. 2022), equation 2.
    """
    num_micro_batches = workload.num_micro_batches
    num_gathers = engine.num_all_gathers(mode, unit, num_micro_batches=num_micro_batches)
    num_reduces = engine.num_reduce_scatters(mode, num_micro_batches=num_micro_batches)
    return Cost(time_s=num_gathers * gather_s(unit, cluster, engine) + num_reduces * reduce_s(unit, cluster, engine))


def gather_s(unit: UnitProfile, cluster: Cluster, engine: Engine = DEFAULT) -> float:
    """Seconds of one all-gather of a unit."""
    num_bytes = engine.all_gather_bytes(unit, cluster.world_size)
    return cluster.all_gather.ring_s(num_bytes, cluster.world_size) if num_bytes else 0.0


def reduce_s(unit: UnitProfile, cluster: Cluster, engine: Engine = DEFAULT) -> float:
    """Seconds of one reduce-scatter of its gradients."""
    num_bytes = engine.reduce_scatter_bytes(unit, cluster.world_size)
    return cluster.reduce_scatter.ring_s(num_bytes, cluster.world_size) if num_bytes else 0.0
