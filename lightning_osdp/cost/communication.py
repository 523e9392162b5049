"""Time of a unit's collectives: the alpha and beta terms of the paper's equation 2."""

from __future__ import annotations

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost.cost import Cost, Workload


def communication_cost(unit: UnitProfile, mode: ShardingMode, *, cluster: Cluster, workload: Workload) -> Cost:
    """Seconds of all-gathers and reduce-scatters in one optimizer step.

    Equation 2, with alpha and beta of each collective apart, for each of K micro-batches that reduces gradients:

        t_ZDP = 2 AG(S) + RS(S) = 3 (N-1) alpha + 3 (N-1)/N S beta    where both collectives cost the same
        t_DP  = 1 AG(S) + RS(S) = 2 (N-1) alpha + 2 (N-1)/N S beta

    Where only the last one reduces them, a step takes 2 K AG(S) + RS(S) of a ZDP unit and AG(S) + RS(S) of a DP one.

    A ZDP unit inside a block that is run again in backward is gathered once more.

    Frozen parameters have no gradient: a unit without trainable parameters reduces nothing.

    References:
        OSDP (Jiang et al. 2022), equation 2.
    """
    repeats = workload.num_micro_batches
    gathers_s = mode.num_all_gathers(len(unit.calls) + unit.num_reruns, repeats) * gather_s(unit, cluster)
    return Cost(time_s=gathers_s + mode.num_reduce_scatters(repeats) * reduce_s(unit, cluster))


def gather_s(unit: UnitProfile, cluster: Cluster) -> float:
    """Seconds of one all-gather of a unit."""
    return cluster.all_gather.ring_s(unit.gathered_bytes, cluster.world_size) if unit.gathered_bytes else 0.0


def reduce_s(unit: UnitProfile, cluster: Cluster) -> float:
    """Seconds of one reduce-scatter of its gradients: of the whole flat parameter once any of it is trainable."""
    return cluster.reduce_scatter.ring_s(unit.gathered_bytes, cluster.world_size) if unit.gradient_bytes else 0.0
