"""Links and memory as ranks see them."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.core.cluster import UNIT_PARTS
from lightning_osdp.profiler import measure_cluster
from lightning_osdp.profiler.machine import cluster
from lightning_osdp.profiler.machine.links import measure_agreement
from tests.distributed.support.fits import measuring_briefly
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")


@measuring_briefly
def measured_cluster(available_bytes):
    """measure_cluster where this rank may use its entry of ``available_bytes``."""
    with mock.patch.object(cluster, "default_memory_limit_bytes", return_value=available_bytes[dist.get_rank()]):
        return measure_cluster(torch.device("cpu"), local_ranks=dist.get_world_size())


def agreement_beside_a_device():
    """Link of agreements in a group of hosts, and whether nothing went through the default group."""
    hosts = dist.new_group()
    before = dist.group.WORLD._get_backend(CPU)._get_sequence_number_for_group()
    link = measure_agreement(hosts)
    is_beside = dist.group.WORLD._get_backend(CPU)._get_sequence_number_for_group() == before
    dist.destroy_process_group(hosts)
    return link, is_beside


@measuring_briefly
def memory_beside_groups(node_size):
    """Limit of `measure_cluster` on a device of 100 bytes, of which each process group takes one; groups afterwards."""
    live = dist.distributed_c10d._world.pg_map

    def free_bytes(*_, **__):
        return 100 - len(live)

    with mock.patch.object(cluster, "default_memory_limit_bytes", new=free_bytes):
        found = measure_cluster(torch.device("cpu"), local_ranks=dist.get_world_size(), node_size=node_size)
    return found.memory_bytes, len(live)


@pytest.mark.parametrize("available_bytes", [[3000, 2000], slow([3000, 2500, 2000, 4000])], ids=["2", "4"])
def test_all_ranks_see_the_same_cluster_and_its_links_take_time(ranks, available_bytes):
    world_size = len(available_bytes)
    first, *others = ranks(world_size).run(measured_cluster, available_bytes=available_bytes)
    assert others == [first] * (world_size - 1)
    assert set(first.unit_overhead) == set(UNIT_PARTS)
    assert first.world_size == world_size
    assert first.backend == "gloo"
    assert first.memory_bytes == 2000
    assert not first.has_streams
    assert first.overlaps == bool(first.waits_for)  # by units that are sharded in nodes in any case
    assert first.contention.computing >= 1
    assert first.agreement.ring_s(1000, world_size) > 0
    for link in (first.all_gather, first.reduce_scatter):
        assert link.latency_s >= 0
        assert link.seconds_per_byte >= 0  # 0 where a machine was busy with the smaller of the two largest collectives
        assert link.ring_s(1000, world_size) > 0


def test_what_ranks_take_to_agree_is_timed_in_the_group_of_their_hosts(ranks):
    (first, is_beside), (second, _) = ranks(2).run(agreement_beside_a_device)
    assert is_beside
    assert first == second
    assert first.latency_s > 0


@pytest.mark.slow
@pytest.mark.parametrize(("node_size", "num_groups"), [(2, 2), (None, 0)])
def test_memory_is_measured_while_the_groups_of_nodes_have_theirs(ranks, node_size, num_groups):
    for memory_bytes, num_others in ranks(4).run(memory_beside_groups, node_size=node_size):
        assert memory_bytes == 100 - num_others - num_groups
