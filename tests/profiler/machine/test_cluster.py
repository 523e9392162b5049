import math
import random
import statistics
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.testbed.groups import fake_group
from lightning_osdp.core.cluster import Cluster, Contention, Link, UnitOverhead
from lightning_osdp.profiler import measure_cluster
from lightning_osdp.profiler.machine import cluster, links, overlap
from lightning_osdp.profiler.machine.links import link_through, points_by
from lightning_osdp.profiler.machine.overlap import ONE_BY_ONE, contention_of, hidden_share, taken_s

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
    found = measure_cluster(torch.device("cpu"), local_ranks=2)
    assert found.world_size == 1
    assert found.all_gather == found.reduce_scatter == Link(latency_s=0.0, seconds_per_byte=0.0)
    assert found.memory_bytes > 0


@pytest.mark.parametrize(
    ("kind", "has_hosts", "is_timed"), [("cpu", False, True), ("cuda", False, False), ("cuda", True, True)]
)
def test_agreements_are_timed_where_there_is_a_group_for_tensors_of_the_cpu(monkeypatch, kind, has_hosts, is_timed):
    link = Link(latency_s=1e-5, seconds_per_byte=1e-9)
    monkeypatch.setattr(cluster, "measure_link", lambda *_, **__: link)
    monkeypatch.setattr(cluster, "measure_overlap", lambda *_: (False, (), Contention()))
    monkeypatch.setattr(cluster, "_copies_in_reduce_scatter", lambda _: False)
    monkeypatch.setattr(cluster, "measure_unit_overhead", lambda *_: {})
    monkeypatch.setattr(cluster, "measure_call_s", lambda *_: 0.0)
    monkeypatch.setattr(cluster, "measure_slice_s", lambda _: 0.0)
    with fake_group(2):
        hosts = dist.group.WORLD if has_hosts else None
        found = cluster._measure_ranks(torch.device(kind), None, ExitStack(), hosts)
    assert (found.agreement is not None) == is_timed


WORLD_SIZE = 8
KIB, MIB = 2**10, 2**20


def floor_and_protocols(num_bytes):
    """Returns seconds: 25 us at least, those of 10 GB/s up to 4 MiB, beyond it those of a protocol with 100 GB/s."""
    step = num_bytes / WORLD_SIZE
    return max(25e-6, 7 * step / 10e9 if num_bytes <= 4 * MIB else 350e-6 + 7 * step / 100e9)


def alpha_and_beta(num_bytes):
    return 7 * (3e-6 + num_bytes / WORLD_SIZE / 50e9)


def slow(num_bytes):
    return 0.02 + num_bytes / 20e6


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("truth_s", [floor_and_protocols, alpha_and_beta])
@pytest.mark.parametrize("in_a_row", [3, 10])
def test_a_link_is_followed_from_16_kib_to_256_mib_whatever_its_curve(truth_s, noise, in_a_row):
    seeded, asked = random.Random(0), []

    def measured(num_bytes, number, _):
        asked.append((num_bytes, number))
        return num_bytes, truth_s(num_bytes) * (1 + noise * seeded.random())

    link = link_through(points_by(measured, least_in_a_row=in_a_row), WORLD_SIZE)
    assert asked[0][0] <= 64 * KIB
    assert asked[-1][0] == 256 * MIB
    assert {number for size, number in asked if in_a_row == 10 or size <= 16 * MIB} == {10}
    assert min(number * truth_s(size) for size, number in asked if number < 10 or size > 16 * MIB) > 5e-3
    for size in (16 * KIB, 64 * KIB, 300 * KIB, MIB, 16 * MIB, 100 * MIB, 256 * MIB, 1024 * MIB):
        # between two sizes the curve may have a corner, and beyond the last one noise of two points is extrapolated
        tolerance = 2 * noise + (0.35 if truth_s is floor_and_protocols and size not in dict(asked) else 1e-9)
        assert link.ring_s(size, WORLD_SIZE) == pytest.approx(truth_s(size), rel=tolerance)


@pytest.mark.parametrize(("least", "expected"), [(1, [10, 1, 1, 1]), (10, [10] * 4)])
def test_a_very_slow_link_is_measured_at_four_sizes_and_no_more(least, expected):
    asked = []

    def measured(num_bytes, number, repeats):
        asked.append((number, repeats))
        return num_bytes, 10 * slow(num_bytes)

    assert len(points_by(measured, least_in_a_row=least)) == 4
    assert [number for number, _ in asked] == expected
    assert [repeats for _, repeats in asked] == [5, 2, 2, 2]


RATES = {"10 Mbit/s": 1.25e6, "200 Mbit/s": 25e6, "1 Gbit/s": 125e6, "10 GB/s": 1e10}


def timed(link, world_size, *, most_bytes, noise_s=0.0, seed=0):
    """Points of a link by `points_by`, sizes, and seconds of all that ran; each collective waits for late ranks."""
    seeded, sizes, spent_s = random.Random(seed), [], []

    def measured(num_bytes, in_a_row, repeats):
        rows_s = [
            in_a_row * link.ring_s(num_bytes, world_size)
            + sum(seeded.expovariate(1 / noise_s) for _ in range(in_a_row if noise_s else 0))
            for _ in range(repeats + 1)
        ]
        sizes.append(num_bytes)
        spent_s.append(sum(rows_s))
        return num_bytes, min(rows_s[1:]) / in_a_row

    return points_by(measured, most_bytes=most_bytes), sizes, spent_s


@given(st.floats(1e-6, 5e-3), st.sampled_from([*RATES.values()]), st.integers(2, 64), st.integers(0, 2**34))
def test_sizes_go_up_to_the_models_and_the_large_ones_take_half_a_second(latency_s, rate, world_size, most_bytes):
    link = Link(latency_s=latency_s, seconds_per_byte=1 / rate)
    _, sizes, spent_s = timed(link, world_size, most_bytes=most_bytes)
    assert sizes == [16 * KIB * 4**place for place in range(len(sizes))]
    assert len(sizes) >= 4
    assert sizes[4:] == [] or sizes[-2] < most_bytes
    assert sum(spent_s[4:]) <= 0.5
    if sizes[-1] < min(most_bytes, 256 * MIB):  # no time for one more to warm up and one that counts
        assert sum(spent_s[4:]) + 2 * 4 * link.ring_s(sizes[-1], world_size) > 0.45


@pytest.mark.parametrize(
    ("rate", "largest", "within"), [("200 Mbit/s", 4 * MIB, 0.07), ("1 Gbit/s", 16 * MIB, 0.09)], ids=[*RATES][1:3]
)
def test_a_unit_beyond_what_is_timed_is_predicted_among_milliseconds_of_late_ranks(rate, largest, within):
    link, errors = Link(latency_s=5e-4, seconds_per_byte=1 / RATES[rate]), []
    for seed in range(100):
        points, sizes, _ = timed(link, 4, most_bytes=60 * MIB, noise_s=4e-3, seed=seed)
        assert sizes[-1] == largest
        errors.append(link_through(points, 4).ring_s(28 * MIB, 4) / link.ring_s(28 * MIB, 4) - 1)
    assert sorted(map(abs, errors))[95] < within


def test_computing_that_was_timed_in_a_slow_episode_is_timed_again(monkeypatch):
    alone_s = iter([0.9, 0.1])

    def seconds(run, *_, **__):
        sent.clear()
        run()
        return 10 * next(alone_s) if not sent else len(sent) * (0.1 + sent[0] / 1e9)

    sent = []
    monkeypatch.setattr(links, "fastest_together_s", seconds)
    with fake_group(2):
        link = links.measure_link(torch.device("cpu"), MIB, lambda whole, *_: sent.append(whole.nbytes))
    assert [link.ring_s(size, 2) for size in (16 * KIB, MIB)] == pytest.approx([16 * KIB / 1e9, MIB / 1e9])
    assert next(alone_s, None) is None


@pytest.mark.parametrize(
    ("steps", "parameter_bytes", "expected"),
    [
        (((4096, 1e-4), (2**20, 5e-3)), math.inf, 4 * 2**20),
        (((4096, 1e-4), (2**18, 4e-3), (2**20, 17e-3)), math.inf, 4 * 2**18),  # more than 50 ms in three steps
        (((4096, 1e-4), (2**18, 4e-3)), 16 * 2**18, 4 * 2**18),  # a quarter of the model
        (((4096, 1e-4), (2**18, 4e-3)), 15 * 2**18, 4 * 4096),
        (((4096, 1e-2), (2**20, 7e-2)), 1, 4 * 4096),
    ],
)
def test_overlap_is_tried_with_a_collective_like_the_largest_of_a_model(steps, parameter_bytes, expected):
    link = Link(latency_s=1e-4, seconds_per_byte=1e-9, steps=steps)
    with fake_group(4):
        assert overlap._overlapped_bytes(link, parameter_bytes) == expected


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize(("gather_s", "product_s"), [(40e-6, 300e-6), (20e-3, 300e-6), (1e-3, 9e-3)])
@pytest.mark.parametrize("share", [1.0, 0.8, 0.2, 0.0])
def test_overlap_is_found_among_noise_with_5_ms_on_both_sides(share, gather_s, product_s, noise):
    seeded, sides = random.Random(1), []

    def measured(num_gathers, num_products):
        sides.append((num_gathers * gather_s, num_products * product_s))
        seconds = sum(sides[-1]) - share * min(sides[-1])
        return seconds * (1 + noise * seeded.random())

    assert hidden_share(measured) == pytest.approx(share, abs=4 * noise / 2 + 1e-9)
    both = [pair for pair in sides if all(pair)]
    assert len(both) >= (5 if gather_s < 5e-3 else 3)  # long ones are run less often
    assert min(map(min, both)) >= 5e-3 / (1 + noise)


def test_one_slow_episode_does_not_decide_whether_collectives_overlap():
    calls = []

    def measured(num_gathers, num_products):
        calls.append((num_gathers, num_products))
        is_slow = sum(map(all, calls)) == 2 and all(calls[-1])
        return max(1e-3 * num_gathers, 1e-3 * num_products) * (10 if is_slow else 1)

    assert hidden_share(measured) == 1.0


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("gather_s", "product_s"), [(40e-6, 300e-6), (20e-3, 300e-6), (1e-3, 9e-3)])
@pytest.mark.parametrize(("computing", "collectives"), [(1.0, 1.0), (1.13, 1.13), (1.3, 1.05), (1.0, 1.4)])
def test_contention_is_what_both_take_longer_together(gather_s, product_s, computing, collectives, noise):
    seeded = random.Random(1)

    def measured(num_gathers, num_products):
        gathers_s, products_s = num_gathers * gather_s, num_products * product_s
        if gathers_s * collectives < products_s * computing:
            seconds = products_s + gathers_s * collectives * (1 - 1 / computing)
        else:
            seconds = gathers_s + products_s * computing * (1 - 1 / collectives)
        return seconds * (1 + noise * seeded.random())

    found = contention_of(measured)
    assert found.computing == pytest.approx(computing, abs=4 * noise + 1e-9)
    assert found.collectives == pytest.approx(collectives, abs=4 * noise + 1e-9)


def test_contention_is_found_beside_long_collectives_whose_seconds_scatter():
    seeded = random.Random(1)

    def measured(num_gathers, num_products):
        gathers_s, products_s = num_gathers * 35e-3 * (1 + 0.5 * seeded.random()), num_products * 300e-6
        return max(products_s + gathers_s * (1 - 1 / 1.4), gathers_s)

    found = [contention_of(measured) for _ in range(9)]
    assert statistics.median(each.computing for each in found) == pytest.approx(1.4, abs=0.15)
    assert statistics.median(each.collectives for each in found) < 1.1


def test_contention_of_what_cannot_run_together_is_bounded():
    found = contention_of(lambda num_gathers, num_products: 1e-3 * (num_gathers + num_products))
    assert (found.computing, found.collectives) == pytest.approx((1.9, 1.9))


@pytest.mark.parametrize("contention", [Contention(), Contention(computing=1.5, collectives=1.2)])
@pytest.mark.parametrize("each_s", [0.0, 2e-3])
def test_what_small_collectives_take_of_computing_is_told_from_contention(contention, each_s):
    """Collectives of 3 ms, and products of 1 ms that are slowed as long as one runs."""

    def measured(num_collectives, num_products):
        if not num_products:
            return 3e-3 * num_collectives
        slowed_s = 3e-3 * (1 - 1 / contention.computing)
        return 1e-3 * num_products * ONE_BY_ONE + (slowed_s + each_s) * num_collectives

    assert taken_s(measured, 3e-3, contention) == pytest.approx(each_s, abs=1e-12)


@pytest.mark.parametrize(("delay_s", "factor"), [(0.0, 1.0), (7e-3, 1.0), (7e-3, 1.25)])
def test_contention_of_large_collectives_is_told_from_the_delay_of_each(monkeypatch, delay_s, factor):
    """Collectives of 1 ms if they are small, and of 31 ms if they are large."""
    link = Link(latency_s=1e-3, seconds_per_byte=1e-9, steps=((4096, 1e-3), (262144, 31e-3)))
    found = Cluster(
        world_size=2,
        all_gather=link,
        reduce_scatter=link,
        overlaps=True,
        contention=Contention(computing=1.5, collectives=factor + delay_s / 31e-3),
        unit_overhead={part: UnitOverhead() for part in ("gather", "reduce")},
    )
    monkeypatch.setattr(overlap, "_beside_s", lambda *_: 1e-3 * factor + delay_s)
    monkeypatch.setattr(overlap, "taken_s", lambda *_: 2e-3)
    with fake_group(2):
        found = overlap.with_small_collectives(found, torch.device("cpu"))
    assert found.contention.collectives == pytest.approx(factor)
    assert found.contention.delay_s == pytest.approx(delay_s)
    assert [each.fixed_s for each in found.unit_overhead.values()] == [2e-3, 2e-3]


def test_computing_that_is_not_lengthened_by_as_much_as_contention_says_is_taken_nothing():
    contention = Contention(computing=2.0)
    assert taken_s(lambda number, products: 1e-3 * max(number, 8 * products), 1e-3, contention) == 0.0
