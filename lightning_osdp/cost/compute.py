"""Time that a unit's operators compute: the gamma term of the paper's equation 2."""

from __future__ import annotations

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.core.workload import Workload
from lightning_osdp.cost.cost import Cost
from lightning_osdp.engine import DEFAULT, Engine


def compute_cost(
    unit: UnitProfile, mode: ShardingMode, *, cluster: Cluster, workload: Workload, engine: Engine = DEFAULT
) -> Cost:
    """Forward and backward seconds of one optimizer step, ``K (fixed + b gamma)``; the same in every mode.

    The paper's time is proportional to the batch; small ones do not fill the device, so it is affine here.

    References:
        OSDP (Jiang et al. 2022), equation 2.
    """
    del mode, cluster, engine
    return Cost(time_s=workload.num_micro_batches * unit.compute_s.at(workload.micro_batch_size))


def optimizer_s(profile: ModelProfile, cluster: Cluster) -> float:
    """Seconds of the optimizer step on this rank's shards."""
    trainable = sum(operator.num_trainable for operator in profile)
    return profile.optimizer.s_per_element * trainable / cluster.world_size
