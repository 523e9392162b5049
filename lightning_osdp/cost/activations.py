"""Memory of what forward saves for backward, and the time that it takes to do without."""

from __future__ import annotations

from lightning_osdp.core.blocks import RERUN, stays_bytes
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import BlockProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.core.workload import Workload
from lightning_osdp.cost.cost import Cost
from lightning_osdp.engine import DEFAULT, Engine


def activations_cost(
    unit: UnitProfile, mode: ShardingMode, *, cluster: Cluster, workload: Workload, engine: Engine = DEFAULT
) -> Cost:
    """Bytes saved for backward at the micro-batch in hand, and seconds of running the unit's block again or of copies.

    Bytes are the same in every sharding mode.
    """
    del engine
    time_s = workload.num_micro_batches * activations_s(unit, mode, cluster, workload.micro_batch_size)
    return Cost(time_s=time_s, memory_bytes=saved_bytes(unit, mode.activations, workload.micro_batch_size))


def saved_bytes(unit: UnitProfile, choice: str, num_samples: int) -> float:
    """Bytes that stay on the device from the unit's forward to its backward, at most."""
    if unit.block is None:
        return unit.saved_bytes.at(num_samples)
    if choice == "keep":
        return (unit.saved_bytes + unit.block.borrowed_bytes).at(num_samples)
    return stays_bytes(unit.block, choice).at(num_samples)


def activations_s(unit: UnitProfile, mode: ShardingMode, cluster: Cluster, num_samples: int) -> float:
    """Seconds of one micro-batch beyond those of keeping everything."""
    return 0.0 if unit.block is None else block_s(unit.block, mode.activations, cluster, num_samples)


def block_s(block: BlockProfile, choice: str, cluster: Cluster, num_samples: int) -> float:
    """The same of a block."""
    again_s = block.rerun_s.at(num_samples) if choice in RERUN else 0.0
    return again_s + 2 * copied_s(block, choice, cluster, num_samples)


def copied_s(block: BlockProfile | None, choice: str, cluster: Cluster, num_samples: int) -> float:
    """Seconds of copies to host memory in one micro-batch's forward; those back in its backward take as long."""
    if block is None or choice not in block.copied_bytes:
        return 0.0
    return block.copied_bytes[choice].at(num_samples) * cluster.host_copy_s_per_byte
