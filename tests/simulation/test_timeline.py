"""Two resources against schedules worked out by hand; and one resource, which is a sum."""

import dataclasses

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.core.units import partition
from lightning_osdp.cost import Workload
from lightning_osdp.engine import FSDP1
from lightning_osdp.simulation import simulate_step


@pytest.fixture
def chain(model):
    """Three units of 100 bytes; forward takes 3 s in each, backward 6 s, and the loss nothing."""

    def build(forward_s=3.0, backward_s=6.0):
        profile = model(100, 100, 100)
        segments = [
            dataclasses.replace(segment, forward_s=Affine(forward_s), backward_s=Affine(backward_s))
            for segment in profile.segments[:-1]
        ]
        return dataclasses.replace(profile, segments=(*segments, profile.segments[-1]))

    return build


def estimate(profile, cluster, modes, *, overlaps, ring_s, num_micro_batches=1, prefetch="pre"):
    # two ranks: a ring takes 1/2 * 100 bytes * seconds_per_byte
    ranks = dataclasses.replace(cluster(2, seconds_per_byte=ring_s / 50), overlaps=overlaps)
    return simulate_step(
        profile,
        partition(profile, min_unit_bytes=0),
        [DP, *({"D": DP, "Z": ZDP}[letter] for letter in modes)],
        ranks,
        Workload(micro_batch_size=1, num_micro_batches=num_micro_batches),
        engine=FSDP1(backward_prefetch=prefetch),
    )


@pytest.mark.parametrize(("modes", "rings"), [("ZZZ", 9), ("DDD", 6), ("ZDZ", 8)])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_what_blocks_adds_up(chain, cluster, modes, rings, num_micro_batches):
    found = estimate(chain(), cluster, modes, overlaps=False, ring_s=2.0, num_micro_batches=num_micro_batches)
    assert found.time_s == pytest.approx(num_micro_batches * (27 + 2.0 * rings))
    assert found.compute_s == pytest.approx(num_micro_batches * 27)
    assert found.communication_s == found.exposed_communication_s == pytest.approx(num_micro_batches * 2.0 * rings)


def test_quick_communication_hides_behind_computing(chain, cluster):
    # all that shows: the first gather, and the last reduce-scatter
    for modes in ("ZZZ", "DDD"):
        found = estimate(chain(), cluster, modes, overlaps=True, ring_s=1.0)
        assert found.time_s == pytest.approx(27 + 2)
        assert found.exposed_communication_s == pytest.approx(2)


def test_without_prefetch_gathers_queue_behind_reduce_scatters(chain, cluster):
    # the host runs ahead: m2 is gathered again while its forward computes, as soon as m1 is freed
    # AG0 1, F0 4, F1 7, F2 10, AG2 8, B2 16, RS2 17, AG1 18, B1 24, RS1 25, AG0 26, B0 32, RS0 33
    found = estimate(chain(), cluster, "ZZZ", overlaps=True, ring_s=1.0, prefetch="none")
    assert found.time_s == pytest.approx(33)


def test_slow_communication_is_all_that_counts(chain, cluster):
    # forward: gathers end at 10, 20, 30; F2 33
    # ZZZ: m2 again until 40, m1 50 (prefetched), B2 46, RS2 60, m0 70 (prefetched when B1 begins, behind RS2)
    #      B1 50..56, RS1 80, B0 70..76, RS0 90: nine rings, one after the other
    assert estimate(chain(), cluster, "ZZZ", overlaps=True, ring_s=10.0).time_s == pytest.approx(90)
    # DDD: B2 39, RS2 49, RS1 59, RS0 69
    assert estimate(chain(), cluster, "DDD", overlaps=True, ring_s=10.0).time_s == pytest.approx(69)


def test_no_more_than_two_freed_units_are_in_flight(model, cluster):
    # computing is slow, gathers quick: the fourth gather waits for the second unit to be freed
    profile = model(100, 100, 100, 100)
    segments = [dataclasses.replace(segment, forward_s=Affine(10.0)) for segment in profile.segments[:-1]]
    profile = dataclasses.replace(profile, segments=(*segments, profile.segments[-1]))
    found = estimate(profile, cluster, "ZZZZ", overlaps=True, ring_s=1.0)
    gathers = [i.start_s for i in found.intervals if i.event.kind == "gather" and i.start_s < 41]
    assert gathers[:4] == pytest.approx([0.0, 1.0, 11.0, 21.0])


def test_micro_batches_wait_for_the_gradients_of_the_one_before(chain, cluster):
    one, five = (
        estimate(chain(), cluster, "ZDZ", overlaps=True, ring_s=4.0, num_micro_batches=number) for number in (1, 5)
    )
    assert five.time_s == pytest.approx(5 * one.time_s)


def test_the_curve_ends_with_the_step_and_never_runs_backwards(chain, cluster):
    found = estimate(chain(), cluster, "ZDZ", overlaps=True, ring_s=4.0)
    seconds = [time_s for time_s, _ in found.moments]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(found.time_s)
    assert max(moment.num_bytes for _, moment in found.moments) == found.peak.peak_bytes
