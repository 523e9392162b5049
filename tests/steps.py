"""Steps to be judged, by ranks whose links take no time."""

from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.core.step import Step, Workload
from lightning_osdp.core.units import partition

FREE = Link(latency_s=0.0, seconds_per_byte=0.0)


def step_of(
    profile, *, world_size=2, micro_batch_size=1, num_micro_batches=1, min_unit_bytes=0, reduce_scatter_copies=True
):
    """A step in units of one operator."""
    return Step(
        profile=profile,
        units=partition(profile, min_unit_bytes=min_unit_bytes),
        cluster=Cluster(
            world_size=world_size,
            all_gather=FREE,
            reduce_scatter=FREE,
            reduce_scatter_copies=reduce_scatter_copies,
        ),
        workload=Workload(micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches),
    )
