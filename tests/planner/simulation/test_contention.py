"""Computing and collectives that slow each other down: schedules worked out by hand, and what must hold for all."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, HDP, HSDP, ZDP
from lightning_osdp.core.cluster import Cluster, Contention, Link, Links
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.simulation import StepClock, simulate_step
from lightning_osdp.planner.simulation.timeline import COMMUNICATION, COMPUTE
from tests.support.overlapped import made, overlapped
from tests.support.steps import step_of
from tests.support.tiers import examples

NOTHING = Contention(computing=1 + 1e-12, collectives=1 + 1e-12)
"""Contention so small that the timeline with it must find what the one without does."""

SLOW = Link(latency_s=0.0, seconds_per_byte=10 / 50)


def estimate(profile, ranks, modes, *, num_micro_batches=1, **settings):
    step = dataclasses.replace(step_of(profile, num_micro_batches=num_micro_batches), cluster=ranks)
    return simulate_step(step, modes, engine=FSDP2(**settings))


@pytest.fixture
def chain(model):
    """Three units of 100 bytes; forward takes 3 s in each, backward 6 s, and the loss nothing."""
    profile = model(100, 100, 100)
    segments = [
        dataclasses.replace(segment, forward_s=Affine(3.0), backward_s=Affine(6.0)) for segment in profile.segments[:-1]
    ]
    return dataclasses.replace(profile, segments=(*segments, profile.segments[-1]))


@pytest.fixture
def ring(cluster):
    """Two ranks: a collective of 100 bytes takes 1 s, or 2 s beside computing, which then takes half as long again."""
    return dataclasses.replace(
        cluster(2, seconds_per_byte=1 / 50), overlaps=True, contention=Contention(computing=1.5, collectives=2.0)
    )


@pytest.mark.parametrize("settings", [{"forward_prefetch": True}, {"asynchronous_unshard": False}])
def test_what_is_hidden_costs_a_part_of_it(chain, ring, settings):
    # AG0 1, AG1 3 beside F0, which has done 4/3 s by then: F0 14/3; AG2 beside F1: 25/3; F2 34/3; B2 52/3; RS2 beside
    # B1, RS1 beside B0; RS0 alone
    found = estimate(chain, ring, [DP] * 4, **settings)
    assert found.time_s == pytest.approx(27 + 2 + 4 * 2 / 3)
    assert found.contention_s == pytest.approx(4 * 2 / 3)
    assert found.exposed_communication_s == pytest.approx(2)
    assert (found.compute_s, found.communication_s) == pytest.approx((27, 6))
    gathers = [(each.start_s, each.end_s) for each in found.intervals if each.event.kind == "gather"]
    assert gathers[:2] == [(0.0, pytest.approx(1.0)), (pytest.approx(1.0), pytest.approx(3.0))]


def test_what_outlasts_computing_goes_on_at_its_own_rate(chain, ring):
    ranks = dataclasses.replace(ring, all_gather=SLOW, reduce_scatter=SLOW)
    # AG0 10; F0 14.5, when AG1 has done 2.25 s of its 10, and AG1 22.25; F1 26.75, AG2 34.5; F2 37.5, B2 43.5;
    # B1 52.5, when RS2 has 5.5 s left: RS2 58; B0 67, RS1 72.5, RS0 82.5
    found = estimate(chain, ranks, [DP] * 4, forward_prefetch=True)
    assert found.time_s == pytest.approx(82.5)
    assert found.contention_s == pytest.approx(9)
    assert found.exposed_communication_s == pytest.approx(82.5 - 27 - 9)


def test_a_delay_lengthens_each_collective_beside_computing_by_as_much(chain, ring):
    delayed = dataclasses.replace(ring, contention=Contention(computing=1.5, collectives=1.5, delay_s=0.5))
    of_factor, of_delay = (estimate(chain, ranks, [DP] * 4, forward_prefetch=True) for ranks in (ring, delayed))
    assert of_delay.time_s == pytest.approx(of_factor.time_s)  # all collectives are of 1 s
    ranks = dataclasses.replace(
        ring, reduce_scatter=SLOW, contention=Contention(computing=1.0, collectives=1.0, delay_s=2.0)
    )
    # AG0 1, AG1 4 beside F0: F0 4; AG2 7, F1 7; F2 10, B2 16; RS2, 5 s of it beside B1, 27; RS1, 5 s beside B0, 38
    found = estimate(chain, ranks, [DP] * 4, forward_prefetch=True)
    assert (found.time_s, found.contention_s) == pytest.approx((48, 0))
    assert [each.end_s for each in found.intervals if each.event.kind == "reduce"] == pytest.approx([27, 38, 48])


MODES = st.lists(st.sampled_from([ZDP, DP]), min_size=9, max_size=9)
FACTORS = st.builds(
    Contention, computing=st.sampled_from([1.0, 1.2, 2.0]), collectives=st.sampled_from([1.0, 1.1, 3.0])
)


def both(model, operator, case, choices, contention, **nodes):
    """The step without contention, and with it."""
    found = made(model, operator, case)
    found = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, contention=Contention(), **nodes))
    modes = [DP if unit.is_root else mode for unit, mode in zip(found.units, choices, strict=False)]
    slowed = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, contention=contention))
    return [(each, modes, simulate_step(each, modes, engine=each.engine)) for each in (found, slowed)]


@examples(300)
@given(case=overlapped(), choices=MODES)
def test_without_contention_both_timelines_are_one(model, operator, case, choices):
    (_, _, alone), (_, _, beside) = both(model, operator, case, choices, NOTHING)
    assert beside.time_s == pytest.approx(alone.time_s, rel=1e-9)
    for resource in (COMPUTE, COMMUNICATION):
        one, other = ([each for each in found.intervals if each.resource == resource] for found in (alone, beside))
        assert [each.event for each in one] == [each.event for each in other]
        for first, second in zip(one, other, strict=True):
            assert (first.start_s, first.end_s) == pytest.approx((second.start_s, second.end_s), abs=1e-6)


@examples(300)
@given(case=overlapped(), choices=MODES, contention=FACTORS)
def test_no_step_is_faster_or_slower_than_by_its_larger_factor(model, operator, case, choices, contention):
    (_, _, alone), (setting, modes, beside) = both(model, operator, case, choices, contention)
    most = max(contention.computing, contention.collectives)
    assert alone.time_s * (1 - 1e-9) <= beside.time_s <= alone.time_s * most * (1 + 1e-9)
    busy_s = beside.compute_s + beside.overhead_s
    assert 0 <= beside.contention_s <= busy_s * (contention.computing - 1) + 1e-9
    seconds = [time_s for time_s, _ in beside.moments]
    assert seconds == sorted(seconds)
    assert StepClock(setting, setting.engine).step(modes).time_s == pytest.approx(beside.time_s)


@examples(150)
@given(case=overlapped(most=4), choices=st.lists(st.sampled_from([ZDP, DP, HSDP, HDP]), min_size=9, max_size=9))
def test_two_communicators_slow_computing_no_more_than_one(model, operator, case, choices):
    link = Link(latency_s=0.1, seconds_per_byte=0.01)
    links = Links(all_gather=link, reduce_scatter=link, all_reduce=link)
    nodes = {"world_size": 8, "node_size": 2, "within_node": links, "between_nodes": links}
    contention = Contention(computing=1.5, collectives=1.25)
    (_, _, alone), (_, _, beside) = both(model, operator, case, choices, contention, **nodes)
    assert alone.time_s * (1 - 1e-9) <= beside.time_s <= alone.time_s * 1.5 * (1 + 1e-9)


def test_a_backend_that_blocks_knows_no_contention(chain, ring):
    blocking = dataclasses.replace(ring, overlaps=False)
    assert estimate(chain, blocking, [ZDP] * 4).contention_s == 0
    assert estimate(chain, blocking, [ZDP] * 4).time_s == pytest.approx(27 + 9)


@pytest.mark.parametrize(
    "factors", [{"computing": 0.9}, {"collectives": 0.0}, {"computing": float("nan")}, {"delay_s": -1e-3}]
)
def test_factors_below_one_and_delays_below_zero_are_refused(factors):
    with pytest.raises(ConfigurationError, match=r"at least 1, and a delay of at least 0, in Contention\(computing="):
        Contention(**factors)


def test_a_file_has_contention(tmp_path):
    link = Link(latency_s=0.0, seconds_per_byte=0.0)
    ranks = Cluster(world_size=2, all_gather=link, reduce_scatter=link, contention=Contention(computing=1.25))
    assert Cluster.from_json(ranks.to_json()) == ranks
