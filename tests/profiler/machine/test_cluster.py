import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.cluster import Link
from lightning_osdp.profiler import measure_cluster
from lightning_osdp.profiler.machine.cluster import fit_link

SIZES = (16_384, 262_144, 2_097_152, 8_388_608)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize(("alpha", "beta"), [(1e-5, 1e-10), (0.0, 1e-9), (1e-3, 0.0), (2e-4, 3e-8)])
def test_the_fit_is_exact_on_points_of_the_model(alpha, beta, world_size):
    truth = Link(latency_s=alpha, seconds_per_byte=beta)
    found = fit_link([(size, truth.ring_s(size, world_size)) for size in SIZES], world_size)
    assert found.latency_s == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert found.seconds_per_byte == pytest.approx(beta, rel=1e-6, abs=1e-18)


@given(st.lists(st.floats(1e-7, 10.0), min_size=4, max_size=4), st.integers(2, 64))
def test_the_fit_is_never_negative(seconds, world_size):
    found = fit_link(list(zip(SIZES, seconds, strict=True)), world_size)
    assert found.latency_s >= 0
    assert found.seconds_per_byte >= 0
    assert found.latency_s + found.seconds_per_byte > 0


def test_times_that_fall_with_size_are_all_latency():
    found = fit_link([(1000, 3.0), (2000, 2.0), (4000, 1.0)], 2)
    assert found.seconds_per_byte == 0
    assert 1.0 <= found.latency_s <= 3.0


def test_times_that_grow_faster_than_size_are_all_bandwidth():
    found = fit_link([(1000, 0.001), (2000, 0.004), (4000, 0.016)], 2)
    assert found.latency_s == 0
    assert found.seconds_per_byte > 0


def test_one_process_has_links_that_cost_nothing():
    cluster = measure_cluster(torch.device("cpu"), local_ranks=2)
    assert cluster.world_size == 1
    assert cluster.all_gather == cluster.reduce_scatter == Link(latency_s=0.0, seconds_per_byte=0.0)
    assert cluster.memory_bytes > 0
