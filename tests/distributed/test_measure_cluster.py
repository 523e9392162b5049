"""Links and memory as ranks see them."""

import pytest
from tiers import slow
from wrap_cases import measured_cluster, memory_beside_groups

from lightning_osdp.core.cluster import UNIT_PARTS

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("available_bytes", [[3000, 2000], slow([3000, 2500, 2000, 4000])], ids=["2", "4"])
def test_all_ranks_see_the_same_cluster_and_its_links_take_time(ranks, available_bytes):
    world_size = len(available_bytes)
    first, *others = ranks(world_size).run(measured_cluster, available_bytes=available_bytes)
    assert others == [first] * (world_size - 1)
    assert set(first.unit_overhead) == set(UNIT_PARTS)
    assert first.world_size == world_size
    assert first.backend == "gloo"
    assert first.memory_bytes == 2000
    for link in (first.all_gather, first.reduce_scatter):
        assert link.latency_s >= 0
        assert link.seconds_per_byte > 0
        assert link.ring_s(1000, world_size) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("node_size", "num_groups"), [(2, 2), (None, 0)])
def test_memory_is_measured_while_the_groups_of_nodes_have_theirs(ranks, node_size, num_groups):
    for memory_bytes, num_others in ranks(4).run(memory_beside_groups, node_size=node_size):
        assert memory_bytes == 100 - num_others - num_groups
