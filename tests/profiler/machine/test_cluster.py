import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.cluster import Link
from lightning_osdp.profiler import measure_cluster
from lightning_osdp.profiler.machine.cluster import link_through

SIZES = (16_384, 262_144, 2_097_152, 8_388_608)


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize(("alpha", "beta"), [(1e-5, 1e-10), (0.0, 1e-9), (1e-3, 0.0), (2e-4, 3e-8)])
def test_a_link_of_alpha_and_beta_is_found_at_every_size_above_the_first(alpha, beta, world_size):
    truth = Link(latency_s=alpha, seconds_per_byte=beta)
    found = link_through([(size, truth.ring_s(size, world_size)) for size in SIZES], world_size)
    for size in (SIZES[0], 1e5, 5e6, 1e9):
        assert found.ring_s(size, world_size) == pytest.approx(truth.ring_s(size, world_size), rel=1e-9)
    assert found.ring_s(1, world_size) == found.ring_s(SIZES[0], world_size)
    assert found.seconds_per_byte == pytest.approx(beta, abs=1e-18)


@given(st.lists(st.floats(1e-7, 10.0), min_size=4, max_size=4), st.integers(2, 64))
def test_more_bytes_never_take_less_and_what_was_measured_is_never_exceeded(seconds, world_size):
    found = link_through(list(zip(SIZES, seconds, strict=True)), world_size)
    ring_s = [found.ring_s(size, world_size) for size in (1, *SIZES, 10**9)]
    assert ring_s == pytest.approx(sorted(ring_s))
    assert ring_s[0] > 0
    assert all(found_s <= measured_s * (1 + 1e-9) for found_s, measured_s in zip(ring_s[1:], seconds, strict=False))


def test_a_floor_and_a_change_of_protocol_are_followed():
    # up to 64 KiB a message takes 20 us whatever its size; up to 1 MiB 1 GB/s is reached, then 10 GB/s
    truth = {4**7: 20e-6, 4**8: 20e-6, 4**9: 216e-6, 4**10: 1.0e-3, 4**11: 1.3e-3, 4**12: 2.6e-3}
    found = link_through([(2 * size, seconds) for size, seconds in truth.items()], 2)
    assert [found.ring_s(2 * size, 2) for size in truth] == pytest.approx([*truth.values()])
    assert found.ring_s(2 * (4**8 + 4**9) / 2, 2) == pytest.approx(118e-6)
    assert found.ring_s(2 * 2 * 4**12, 2) == pytest.approx(2.6e-3 + 4**12 * (1.3e-3 / (4**12 - 4**11)))


def test_a_slow_episode_is_no_part_of_the_link():
    found = link_through([(1000, 3.0), (2000, 2.0), (4000, 5.0)], 2)
    assert [found.ring_s(size, 2) for size in (1000, 2000, 4000)] == [2.0, 2.0, 5.0]


def test_one_process_has_links_that_cost_nothing():
    cluster = measure_cluster(torch.device("cpu"), local_ranks=2)
    assert cluster.world_size == 1
    assert cluster.all_gather == cluster.reduce_scatter == Link(latency_s=0.0, seconds_per_byte=0.0)
    assert cluster.memory_bytes > 0
