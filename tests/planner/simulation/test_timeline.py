"""Two resources against schedules worked out by hand; and one resource, which is a sum."""

import dataclasses

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, ZDP
from lightning_osdp.core.cluster import Contention
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.planner.cost import HostUpdate
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.simulation import StepClock, simulate_step
from lightning_osdp.planner.simulation.step import durations_of, timeline_of
from tests.support.steps import step_of


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


def estimate(profile, cluster, modes, *, overlaps, ring_s, num_micro_batches=1, of_cluster=None, **settings):
    # two ranks: a ring takes 1/2 * 100 bytes * seconds_per_byte
    ranks = dataclasses.replace(cluster(2, seconds_per_byte=ring_s / 50), overlaps=overlaps, **of_cluster or {})
    step = dataclasses.replace(step_of(profile, num_micro_batches=num_micro_batches), cluster=ranks)
    chosen = [DP, *({"D": DP, "Z": ZDP}[letter] for letter in modes)]
    return simulate_step(step, chosen, engine=FSDP2(**settings))


@pytest.mark.parametrize(("modes", "rings"), [("ZZZ", 9), ("DDD", 6), ("ZDZ", 8)])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_what_blocks_adds_up(chain, cluster, modes, rings, num_micro_batches):
    found = estimate(chain(), cluster, modes, overlaps=False, ring_s=2.0, num_micro_batches=num_micro_batches)
    assert found.time_s == pytest.approx(num_micro_batches * (27 + 2.0 * rings))
    assert found.compute_s == pytest.approx(num_micro_batches * 27)
    assert found.communication_s == found.exposed_communication_s == pytest.approx(num_micro_batches * 2.0 * rings)


EXPLICIT = {"forward_prefetch": True}
IMPLICIT = {"asynchronous_unshard": False}
CONTENTIONS = [Contention(), Contention(computing=1 + 1e-12)]


@pytest.mark.parametrize(
    ("settings", "freed", "kept"),
    [
        # AG0 1, AG1 2, F0 4, AG2 5, F1 7, F2 10, AG2 11, AG1 12, B2 17, RS2 18, AG0 19, B1 23, RS1 24, B0 29, RS0 30:
        # all that shows is the first gather, that of m2 once forward is over, and the last reduce-scatter
        (EXPLICIT, 27 + 3, 27 + 2),
        # m2 is gathered again while its forward computes, as soon as m1 is copied out
        (IMPLICIT, 27 + 2, 27 + 2),
        # every gather of forward shows
        ({}, 27 + 5, 27 + 4),
    ],
)
def test_quick_communication_hides_behind_computing(chain, cluster, settings, freed, kept):
    for modes, expected in (("ZZZ", freed), ("DDD", kept)):
        found = estimate(chain(), cluster, modes, overlaps=True, ring_s=1.0, **settings)
        assert found.time_s == pytest.approx(expected)
        assert found.exposed_communication_s == pytest.approx(expected - 27)


def test_without_prefetch_gathers_queue_behind_reduce_scatters(chain, cluster):
    # F2 10, AG2 11, B2 17, RS2 18, AG1 19, B1 25, RS1 26, AG0 27, B0 33, RS0 34
    found = estimate(chain(), cluster, "ZZZ", overlaps=True, ring_s=1.0, backward_prefetch="none", **EXPLICIT)
    assert found.time_s == pytest.approx(34)
    # the host runs ahead: AG2 5, behind the copy of m1 at 4
    found = estimate(chain(), cluster, "ZZZ", overlaps=True, ring_s=1.0, backward_prefetch="none", **IMPLICIT)
    assert found.time_s == pytest.approx(33)


def test_slow_communication_is_all_that_counts(chain, cluster):
    # implicit ZZZ: m2 again until 40, m1 50 (prefetched), B2 46, RS2 60, m0 70 (prefetched when B1 begins, behind RS2)
    #      B1 50..56, RS1 80, B0 70..76, RS0 90: nine rings, one after the other
    assert estimate(chain(), cluster, "ZZZ", overlaps=True, ring_s=10.0, **IMPLICIT).time_s == pytest.approx(90)
    # explicit: m2 is gathered again when forward has ended, 33, instead of 30
    assert estimate(chain(), cluster, "ZZZ", overlaps=True, ring_s=10.0, **EXPLICIT).time_s == pytest.approx(93)
    # DDD: gathers end at 10, 20, 30; F2 33, B2 39, RS2 49, RS1 59, RS0 69
    for settings in (EXPLICIT, IMPLICIT):
        assert estimate(chain(), cluster, "DDD", overlaps=True, ring_s=10.0, **settings).time_s == pytest.approx(69)


@pytest.mark.parametrize("contention", CONTENTIONS)
@pytest.mark.parametrize("modes", ["DDD", "ZZZ"])
def test_computing_waits_for_one_reduce_scatter_before_it_copies_for_the_next(model, cluster, modes, contention):
    # units of 100, 100 and 1000 bytes, of which the last one's backward takes no time and the first one's is long:
    # AG0 1, AG1 2, AG2 12, F 12, B2 12, RS2 22; B1 is done at 18 and its gradients are copied at 22, not at 18;
    # B0 22..42, RS0 43. ZZZ: AG2 again 22, AG1 23, RS2 33, B1 29, and AG0 behind RS2 34 is waited for anyway: B0 54
    profile = model(100, 100, 1000)
    backward_s = (20.0, 6.0, 0.0)
    segments = [
        dataclasses.replace(segment, forward_s=Affine(0.0), backward_s=Affine(seconds))
        for segment, seconds in zip(profile.segments, backward_s, strict=False)
    ]
    profile = dataclasses.replace(profile, segments=(*segments, profile.segments[-1]))
    found = estimate(
        profile, cluster, modes, overlaps=True, ring_s=1.0, of_cluster={"contention": contention}, **EXPLICIT
    )
    assert found.time_s == pytest.approx({"DDD": 43, "ZZZ": 55}[modes])
    computed = [each.start_s for each in found.intervals if each.event.kind == "backward"]
    assert computed[-1] == pytest.approx({"DDD": 22, "ZZZ": 34}[modes])


@pytest.mark.parametrize("contention", CONTENTIONS)
def test_the_host_waits_for_some_kinds_while_others_run_beside_computing(chain, cluster, contention):
    # AG0 1, AG1 2, F0 4, AG2 5, F1 7, F2 10, AG2 11, AG1 12, B2 17, RS2 18, AG0 19 beside B1 24, RS1 25, B0 31, RS0 32
    of_cluster = {"contention": contention, "waits_for": ("reduce",)}
    found = estimate(chain(), cluster, "ZZZ", overlaps=True, ring_s=1.0, of_cluster=of_cluster, **EXPLICIT)
    assert found.time_s == pytest.approx(27 + 5)
    # all gathers of forward and backward show, and the last reduce-scatter
    of_cluster["waits_for"] = ("gather",)
    found = estimate(chain(), cluster, "ZZZ", overlaps=True, ring_s=1.0, of_cluster=of_cluster, **EXPLICIT)
    assert found.time_s >= 27 + 7


@pytest.mark.parametrize("contention", CONTENTIONS)
def test_without_streams_synchronous_all_gathers_are_waited_for(chain, cluster, contention):
    of_cluster = {"contention": contention, "has_streams": False}
    blocking = estimate(chain(), cluster, "ZZZ", overlaps=True, ring_s=1.0, of_cluster=of_cluster, **IMPLICIT)
    of_cluster |= {"has_streams": True, "waits_for": ("gather",)}
    expected = estimate(chain(), cluster, "ZZZ", overlaps=True, ring_s=1.0, of_cluster=of_cluster)
    assert blocking.time_s == pytest.approx(expected.time_s)
    assert blocking.time_s >= 27 + 7


@pytest.mark.parametrize(
    ("settings", "starts"),
    [
        ({}, [0.0, 11.0, 22.0, 33.0]),  # when computing comes to a unit
        (EXPLICIT, [0.0, 1.0, 11.0, 21.0]),  # when it comes to the unit before
        (IMPLICIT, [0.0, 1.0, 2.0, 11.0]),  # when the second one before is copied out: m0 at 1, m1 at 11
    ],
)
def test_slow_computing_holds_gathers_back(model, cluster, settings, starts):
    profile = model(100, 100, 100, 100)
    segments = [dataclasses.replace(segment, forward_s=Affine(10.0)) for segment in profile.segments[:-1]]
    profile = dataclasses.replace(profile, segments=(*segments, profile.segments[-1]))
    found = estimate(profile, cluster, "ZZZZ", overlaps=True, ring_s=1.0, **settings)
    gathers = [interval.start_s for interval in found.intervals if interval.event.kind == "gather"]
    assert gathers[:4] == pytest.approx(starts)


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


AHEAD = 1 + 4 / 7
"""Bytes of the host's memory over those of an update in place: copies of two states move 4 bytes where the update,
which reads weights, gradient and states, and writes all but the gradient, moves 7."""


@pytest.mark.parametrize(
    ("contention", "num_micro_batches"), [(CONTENTIONS[0], 1), (CONTENTIONS[1], 2), (CONTENTIONS[0], 5)]
)
@pytest.mark.parametrize(
    ("hosted", "update_s", "copy_s", "more_s"),
    [
        # gradients are reduced at 18, 24 and 30, see above; each copy of 50 bytes takes so many seconds
        ((1, 2, 3), 2.0, 0.0, 2.0),
        ((1, 2, 3), 5.0, 0.0, 5.0),
        ((1, 2, 3), 8.0, 0.0, 4.0 + 8.0 / AHEAD),  # 18 to 26, 26 to 34, and then in the step, without copies of states
        # the same with two copies each; the optimizer's step copies all back
        ((1, 2, 3), 6.0, 1.0, 4.0 + 6.0 / AHEAD + 2 * 1.0 + 3 * 1.0),
        ((3,), 8.0, 0.0, 0.0),
        ((2, 3), 8.0, 0.0, 4.0),
        ((1,), 8.0, 0.0, 8.0),
    ],
)
def test_updates_on_the_host_run_beside_backward(
    chain, cluster, contention, num_micro_batches, hosted, update_s, copy_s, more_s
):
    profile, places = chain(), [DP, ZDP, ZDP, ZDP]
    of_element_s = update_s / (next(iter(profile)).num_trainable / 2) / AHEAD
    for unit in hosted:
        places[unit] = places[unit].but(states="host")
    found = {}
    for is_ahead, has_streams in ((True, True), (True, False), (False, True)):
        optimizer = OptimizerProfile(host_s_per_element=of_element_s, host_is_ahead=is_ahead)
        ranks = dataclasses.replace(
            cluster(2, seconds_per_byte=1 / 50),
            overlaps=True,
            has_streams=has_streams,
            contention=contention,
            host_copy_s_per_byte=copy_s / 50,
        )
        step = step_of(dataclasses.replace(profile, optimizer=optimizer), num_micro_batches=num_micro_batches)
        step = dataclasses.replace(step, cluster=ranks)
        engine = FSDP2(**EXPLICIT)
        device_s = simulate_step(step, [DP, ZDP, ZDP, ZDP], engine=engine).time_s
        estimated = simulate_step(step, places, engine=engine)
        assert StepClock(step, engine).step(places).time_s == pytest.approx(estimated.time_s)
        assert estimated.exposed_communication_s == pytest.approx(device_s - 27 * num_micro_batches)
        found[is_ahead, has_streams] = estimated.time_s - device_s
        updates = [round(each.end_s - each.start_s, 6) for each in estimated.updates]
        expected = [(update_s if begins else update_s / AHEAD) + 2 * copy_s for begins in (True, True, more_s <= 8.0)]
        assert updates == pytest.approx(expected[: len(hosted)] if is_ahead and has_streams else [])
    waiting_s = len(hosted) * (update_s / AHEAD + 3 * copy_s)
    assert found == pytest.approx({(True, True): more_s, (True, False): waiting_s, (False, True): waiting_s})


@pytest.mark.parametrize("contention", CONTENTIONS)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("copied_s", "more_s", "began_s"),
    [
        # gradients are reduced at 18, 24 and 30, see above
        (2.0, 2.0, [20, 26, 32]),
        (8.0, 12.0, [26, 34, 42]),  # 18 to 26, 26 to 34, 34 to 42
    ],
)
def test_backward_ends_when_gradients_have_come_to_the_host(
    chain, cluster, contention, num_micro_batches, copied_s, more_s, began_s
):
    ranks = dataclasses.replace(cluster(2, seconds_per_byte=1 / 50), overlaps=True, contention=contention)
    step = dataclasses.replace(step_of(chain(), num_micro_batches=num_micro_batches), cluster=ranks)
    engine, found = FSDP2(**EXPLICIT), []
    for seconds in (0.0, copied_s):
        durations = durations_of(step, engine)._replace(
            updates=dict.fromkeys((1, 2, 3), HostUpdate(beside_s=0.5, after_s=0.25)),
            copied_out_s=dict.fromkeys((1, 2, 3), seconds),
        )
        timeline = timeline_of(durations, ranks, engine)
        for events in engine.events_of(step, [DP, ZDP, ZDP, ZDP]):
            for event in events:
                timeline.read(event)
            timeline.end_backward()
        found.append(timeline)
    device, host = (each.total_s(num_micro_batches) for each in found)
    assert host - device == pytest.approx(more_s * num_micro_batches)
    before_s = found[1].ends_s[-2]
    assert [each.start_s - before_s for each in found[1].updates] == pytest.approx(began_s)
