"""Ring collectives against numbers worked out by hand."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.core.axes import DP, ZDP
from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.planner.engine import effects_of
from tests.support.steps import FAST, SLOW, TWO_NODES

LINK = Link(latency_s=1e-5, seconds_per_byte=1e-9)


@pytest.mark.parametrize(
    ("num_bytes", "world_size", "expected_s"),
    [
        (8_000_000, 8, 7 * 1e-5 + 7 / 8 * 8e-3),  # 70 us in 7 steps, and 7 shards of 1 ms each
        (8_000_000, 4, 3e-5 + 6e-3),
        (8_000_000, 2, 1e-5 + 4e-3),
        (0, 4, 3e-5),  # latency alone
        (1, 2, 1e-5 + 0.5e-9),
    ],
)
def test_a_ring_takes_one_latency_and_one_shard_per_step(num_bytes, world_size, expected_s):
    assert LINK.ring_s(num_bytes, world_size) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("steps", [(), ((1e3, 2e-5), (1e6, 1e-3), (4e6, 4.6e-3))])
def test_a_link_of_twice_the_rate_takes_half_of_all_but_the_latency(steps):
    link = Link(latency_s=2e-5, seconds_per_byte=1.2e-9, steps=steps)
    for num_bytes in (0, 1e3, 5e5, 4e6, 1e8):
        expected_s = 2e-5 + (link.step_s(num_bytes) - 2e-5) / 2
        assert link.at_rate(2.0).step_s(num_bytes) == pytest.approx(expected_s, rel=1e-12)


def test_one_rank_communicates_nothing():
    assert LINK.ring_s(10**9, 1) == 0.0


def test_a_step_of_eight_ranks_costs_what_equation_2_says():
    # S = 400 MB at 10 GB/s, alpha = 20 us, N = 8: 3 * 7 * 20 us + 3 * 7/8 * 40 ms, and two thirds of it
    link = Link(latency_s=20e-6, seconds_per_byte=1 / 10e9)
    ring_s = link.ring_s(400e6, 8)
    zdp, dp = (sum(effects_of(mode).counts().values()) for mode in (ZDP, DP))
    assert zdp * ring_s == pytest.approx(0.42e-3 + 105e-3)
    assert dp * ring_s == pytest.approx(0.28e-3 + 70e-3)


@settings(deadline=None)
@given(num_bytes=st.integers(0, 2**45), world_size=st.integers(1, 4096))
def test_more_bytes_and_more_ranks_never_take_less(num_bytes, world_size):
    assert LINK.ring_s(num_bytes, world_size) <= LINK.ring_s(num_bytes + 1, world_size)
    assert LINK.ring_s(num_bytes, world_size) <= LINK.ring_s(num_bytes, world_size + 1) * (1 + 1e-12)


def test_a_cluster_is_one_node_of_unknown_memory_unless_told():
    cluster = Cluster(world_size=2, all_gather=LINK, reduce_scatter=LINK)
    assert (cluster.backend, cluster.memory_bytes) == ("", None)


def test_inside_of_a_node_links_are_those_of_its_ranks():
    assert TWO_NODES.all_gather_s(1e6) == SLOW.ring_s(1e6, 8)
    assert TWO_NODES.all_gather_s(1e6, over="node") == FAST.ring_s(1e6, 4)
    assert TWO_NODES.reduce_scatter_s(1e6) == SLOW.ring_s(1e6, 8)
    assert TWO_NODES.reduce_scatter_s(1e6, over="node") == FAST.ring_s(1e6, 4)
    not_measured = dataclasses.replace(TWO_NODES, within_node=None)
    assert not_measured.all_gather_s(1e6, over="node") == SLOW.ring_s(1e6, 4)


def test_an_all_reduce_between_nodes_goes_there_and_back():
    assert TWO_NODES.all_reduce_between_s(1e6) == 2 * SLOW.ring_s(1e6, 2)
    measured = dataclasses.replace(TWO_NODES, between_nodes=TWO_NODES.within_node)
    assert measured.all_reduce_between_s(1e6) == FAST.ring_s(1e6, 2)


def test_ranks_agree_by_way_of_their_hosts_or_as_their_devices_would():
    cluster = Cluster(world_size=4, all_gather=LINK, reduce_scatter=LINK)
    assert cluster.agreement_s(24) == 2 * LINK.ring_s(24, 4)
    measured = dataclasses.replace(cluster, agreement=Link(latency_s=1e-4, seconds_per_byte=0.0))
    assert measured.agreement_s(24) == pytest.approx(3e-4)
    assert measured.as_if(8, link_rate=10.0).agreement_s(24) == pytest.approx(7e-4)
    assert Cluster.from_json(measured.to_json()) == measured
    assert "agreement" not in cluster.to_json()


def test_nodes_matter_where_there_are_several_with_several_ranks():
    sizes = (None, 1, 2, 3, 4, 8)
    assert [size for size in sizes if dataclasses.replace(TWO_NODES, node_size=size).has_nodes] == [2, 4]


def test_links_of_nodes_are_stored_and_a_cluster_without_them_is_as_it_was_written_before():
    assert Cluster.from_json(TWO_NODES.to_json()) == TWO_NODES
    plain = Cluster(world_size=16, all_gather=LINK, reduce_scatter=LINK)
    assert plain.node_size is None
    assert "node" not in plain.to_json()


@pytest.mark.parametrize("over", ["all", "node"])
def test_all_links_may_be_thought_of_as_faster(over):
    measured = dataclasses.replace(TWO_NODES, between_nodes=TWO_NODES.within_node, all_reduce=SLOW)
    faster = measured.as_if(8, link_rate=10.0)
    for seconds in (Cluster.all_gather_s, Cluster.reduce_scatter_s):
        assert seconds(faster, 1e6, over=over) == pytest.approx(seconds(measured, 1e6, over=over) / 10)
    assert faster.all_reduce_between_s(1e6) == pytest.approx(measured.all_reduce_between_s(1e6) / 10)
    assert faster.all_reduce.ring_s(1e6, 8) == pytest.approx(SLOW.ring_s(1e6, 8) / 10)
    assert measured.as_if(8) == measured


@pytest.mark.parametrize(("ranks", "link"), [(2, FAST), (4, FAST), (6, SLOW), (16, SLOW)])
def test_ranks_of_one_node_have_the_links_inside_of_it(ranks, link):
    fewer = TWO_NODES.as_if(ranks)
    assert (fewer.all_gather, fewer.reduce_scatter) == (link, link)
    not_measured = dataclasses.replace(TWO_NODES, within_node=None)
    assert not_measured.as_if(ranks).all_gather == SLOW
