"""Equation 2 against numbers worked out by hand."""

import pytest

from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.core.units import partition
from lightning_osdp.cost.terms import communication_s


def seconds(unit, cluster, workload):
    """Of ZDP and of DP."""
    return [communication_s(unit, mode, cluster=cluster, workload=workload) for mode in (ZDP, DP)]


@pytest.mark.parametrize(
    ("world_size", "zdp_s", "dp_s"),
    [
        # S = 800 bytes, alpha = 2 s, beta = 1/100 s per byte
        # N = 2: one ring 1 * 2 + 1/2 * 8 =  6 s; three of them 18 s, two 12 s
        (2, 18.0, 12.0),
        # N = 4: one ring 3 * 2 + 3/4 * 8 = 12 s
        (4, 36.0, 24.0),
        # N = 8: one ring 7 * 2 + 7/8 * 8 = 21 s
        (8, 63.0, 42.0),
        (1, 0.0, 0.0),
    ],
)
def test_zdp_takes_three_rings_and_dp_two(unit, cluster, workload, world_size, zdp_s, dp_s):
    ring = cluster(world_size, latency_s=2.0, seconds_per_byte=0.01)
    assert seconds(unit(800), ring, workload()) == pytest.approx([zdp_s, dp_s])


def test_all_gather_and_reduce_scatter_have_their_own_cost(unit, workload):
    # N = 2, S = 8: AG = 1 + 4 * 1 = 5 s, RS = 10 + 4 * 2 = 18 s; ZDP 2 * 5 + 18, DP 5 + 18
    cluster = Cluster(
        world_size=2,
        all_gather=Link(latency_s=1.0, seconds_per_byte=1.0),
        reduce_scatter=Link(latency_s=10.0, seconds_per_byte=2.0),
    )
    assert seconds(unit(8), cluster, workload()) == [28.0, 23.0]


def test_a_frozen_unit_is_gathered_but_reduces_nothing(model, operator, cluster, workload):
    # N = 4, S = 400: a ring takes 300 s; backward comes to what is frozen behind what is trained, and to nothing else
    profile = model(operator("m", 400, frozen=True), operator("first", 400), operator("n", 400, frozen=True))
    _, before, _, behind = partition(profile, min_unit_bytes=0)
    assert seconds(before, cluster(4), workload()) == [300.0, 300.0]
    assert seconds(behind, cluster(4), workload()) == [600.0, 300.0]


def test_a_partly_frozen_unit_reduces_the_gradients_that_there_are(unit, cluster, workload):
    # two rings of 400 bytes or one, 300 s each, and one of 100, 75 s
    partly = unit(400, trainable_bytes=100, gradient_bytes=100)
    assert seconds(partly, cluster(4), workload()) == [675.0, 375.0]


def test_a_unit_without_parameters_of_its_own_costs_nothing(unit, cluster, workload):
    assert seconds(unit(0), cluster(4, latency_s=1.0), workload()) == [0.0, 0.0]


def test_a_unit_that_is_called_twice_is_gathered_again_if_it_was_freed(unit, cluster, workload):
    # a ring takes 300 s: ZDP gathers twice in forward and twice in backward, DP in forward and, as backward frees it
    # after its second call, for the first one again; both reduce once
    assert seconds(unit(400, num_calls=2), cluster(4), workload()) == [1500.0, 900.0]


def test_every_micro_batch_communicates_whatever_its_size(unit, cluster, workload):
    assert seconds(unit(400), cluster(4), workload(num_micro_batches=3)) == [2700.0, 1800.0]
    assert seconds(unit(400), cluster(4), workload(micro_batch_size=7)) == [900.0, 600.0]


def test_what_is_gathered_is_what_travels(unit, cluster, workload):
    halved = unit(400, gathered_bytes=200, gradient_bytes=200)
    assert seconds(halved, cluster(4), workload()) == [450.0, 300.0]
