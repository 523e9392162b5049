"""Steps to be judged, by ranks whose links take no time; and ranks in nodes, whose links do."""

from lightning_osdp.core.cluster import Cluster, Link, Links
from lightning_osdp.core.step import Step, Workload
from lightning_osdp.core.units import partition

FREE = Link(latency_s=0.0, seconds_per_byte=0.0)
SLOW, FAST = (Link(latency_s=0.0, seconds_per_byte=s_per_byte) for s_per_byte in (1e-3, 1e-6))
TWO_NODES = Cluster(
    world_size=8,
    all_gather=SLOW,
    reduce_scatter=SLOW,
    node_size=4,
    within_node=Links(all_gather=FAST, reduce_scatter=FAST, all_reduce=FAST),
)


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
