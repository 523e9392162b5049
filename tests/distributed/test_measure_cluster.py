"""Links and memory as two ranks see them."""

import pytest
from wrap_cases import measured_cluster

pytestmark = pytest.mark.distributed


def test_all_ranks_see_the_same_cluster(ranks):
    first, second = ranks(2).run(measured_cluster, available_bytes=[3000, 2000])
    assert first == second
    assert first.world_size == 2
    assert first.backend == "gloo"
    assert first.num_nodes == 1
    assert first.memory_bytes == 2000


def test_links_take_time(ranks):
    cluster = ranks(2).run(measured_cluster, available_bytes=[1000, 1000])[0]
    for link in (cluster.all_gather, cluster.reduce_scatter):
        assert link.latency_s >= 0
        assert link.seconds_per_byte > 0
        assert link.ring_s(1000, 2) > 0
