"""Modes in cases worked out by hand, and in large ones."""

import dataclasses
import random
import time

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, ZDP
from lightning_osdp.core.profile import OptimizerProfile, Segment
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.assign import assign_modes
from lightning_osdp.planner.cost import Workload


def chain(sizes, **fields):
    return [{"name": f"m{index}", "parameter_bytes": size, **fields} for index, size in enumerate(sizes)]


@pytest.fixture(scope="session")
def two_ranks(cluster):
    return {"cluster": cluster(2, seconds_per_byte=0.01), "workload": Workload(micro_batch_size=1)}


def test_one_rank_has_nothing_to_choose(setting, cluster):
    found = setting(operators=chain([100, 200]), cluster=cluster(1), workload=Workload(micro_batch_size=1))
    least = found.costs.peak(found.costs.least_memory_modes).peak_bytes
    assigned = assign_modes(found, memory_limit_bytes=least)
    assert (assigned.gap, assigned.step_time_s) == (0.0, found.costs.additive.fastest_s)
    assert assign_modes(found, memory_limit_bytes=least - 1) is None


def test_everything_is_kept_where_it_fits_and_nothing_where_nothing_does(setting, two_ranks):
    found = setting(operators=chain([100, 200, 300, 400]), **two_ranks)
    most = found.costs.peak((DP,) * 5).peak_bytes
    assert assign_modes(found, memory_limit_bytes=most).modes == (DP,) * 5
    # 3/2 S against 1 S seconds of S bytes at 0.01 s: 1.5 * 10 and 1.0 * 10
    assert assign_modes(found, memory_limit_bytes=most).step_time_s == pytest.approx(10.0)
    least = found.costs.peak(found.all_zdp_modes).peak_bytes
    assert assign_modes(found, memory_limit_bytes=least - 1) is None


def test_of_equal_operators_the_later_ones_are_kept(setting, two_ranks):
    # base 900; while five are freed m5 is copied out in forward, 900+300 +200 +250 = 1650; while backward of m(k) makes
    # its gradients, k < 5, m(k-1) is prefetched and what m(k+1) sends and receives is in flight: 900 +50 (5-k) +200
    # +300 (own gradients, sent, received) +50 (k+1) = 1700; when all six are the loss 1500: at the least peak the last
    # one is kept for nothing, each further one takes 100 from 1650
    found = setting(operators=chain([100] * 6, activation_bytes_per_sample=50), **two_ranks)
    assert found.costs.peak(found.all_zdp_modes).peak_bytes == 1700
    for limit_bytes, expected in [
        (1700, "ZZZZZD"),
        (1750, "ZZZZDD"),
        (1850, "ZZZDDD"),
        (2149, "ZDDDDD"),
        (2150, "DDDDDD"),
    ]:
        modes = assign_modes(found, memory_limit_bytes=limit_bytes).modes
        assert "".join(mode.name[0] for mode in modes[1:]) == expected


def test_a_binding_moment_other_than_the_last_forward_is_proven_too(setting, two_ranks):
    # the peak is where m2's gradients are reduced: m1 is prefetched then, and only m0 may be freed
    found = setting(operators=chain([10, 20, 1000, 30, 40]), **two_ranks)
    assigned = assign_modes(found, memory_limit_bytes=found.costs.peak(found.all_zdp_modes).peak_bytes)
    assert (assigned.peak.phase, assigned.peak.operator) == ("reduce-scatter", "m2")
    assert assigned.modes == (DP, ZDP, DP, DP, DP, DP)
    assert assigned.gap == 0.0


def test_a_search_that_stops_early_says_so_in_words_that_are_true_of_the_step(setting, cluster):
    draw = random.Random(0)
    sizes = [4 * int(10 ** draw.uniform(5, 7)) for _ in range(400)]
    operators = [{**made, "activation_bytes_per_sample": draw.uniform(0, 1e5)} for made in chain(sizes)]
    found = setting(
        operators=operators,
        cluster=cluster(8, latency_s=2e-5, seconds_per_byte=1e-10),
        workload=Workload(micro_batch_size=2),
    )
    least, most = found.costs.peak(found.all_zdp_modes).peak_bytes, found.costs.peak((DP,) * 401).peak_bytes
    assigned = assign_modes(found, memory_limit_bytes=(9 * least + most) // 10)
    assert 0 < assigned.gap < 1e-3
    text, _, rest = assigned.note.partition(" nodes: ")
    assert text.startswith("depth_first stopped after 300,")
    assert rest == "the best plan that was found, not proven to be the best."


def test_thousands_of_distinct_operators_take_not_much_longer_for_each_than_hundreds(setting, cluster):
    seconds = {}
    for num_units in (400, 3000):
        draw = random.Random(1)
        operators = chain([4 * int(10 ** draw.uniform(5, 7)) for _ in range(num_units)])
        found = setting(
            operators=operators,
            cluster=cluster(8, latency_s=2e-5, seconds_per_byte=1e-10),
            workload=Workload(micro_batch_size=2),
        )
        limit_bytes = sum(made["parameter_bytes"] for made in operators)
        start_s = time.process_time()
        assigned = assign_modes(found, memory_limit_bytes=limit_bytes)
        seconds[num_units] = (time.process_time() - start_s) / num_units
        assert assigned.gap < 1e-3
    # a ratio of two runs on this machine: a search that grows as the square would take 7.5 times as long
    assert seconds[3000] < 4 * seconds[400]


def test_exhaustive_refuses_many_units(setting, two_ranks):
    found = setting(operators=chain([100 + index for index in range(40)], activation_bytes_per_sample=1), **two_ranks)
    least, most = found.costs.peak(found.all_zdp_modes).peak_bytes, found.costs.peak((DP,) * 41).peak_bytes
    with pytest.raises(ConfigurationError, match="search='exhaustive' expects a problem with at most 100,000"):
        assign_modes(found, memory_limit_bytes=(least + most) // 2, search="exhaustive")


def test_what_a_setting_says_of_plain_fsdp_does_not_depend_on_what_is_offered(setting, two_ranks):
    every, one = (setting(operators=chain([100, 200]), modes=modes, **two_ranks) for modes in ((ZDP, DP), (DP,)))
    assert every.all_zdp_modes == one.all_zdp_modes == (DP, ZDP, ZDP)
    # 3 * 1/2 * 300 * 0.01 s, and a third of it is saved by DP
    assert one.costs.step_time_s(one.all_zdp_modes) == pytest.approx(4.5)
    assert [times_s[ZDP] - times_s[DP] for times_s in one.costs.times_s[1:]] == pytest.approx([0.5, 1.0])


def test_what_no_unit_owns_is_part_of_every_step(setting, two_ranks):
    bare = setting(operators=chain([100]), **two_ranks)
    loss = Segment(forward_s=Affine(0.0, 1.0), backward_s=Affine(0.0, 2.0))
    profile = dataclasses.replace(
        bare.profile,
        segments=(*bare.profile.segments[:-1], loss),
        optimizer=OptimizerProfile(s_per_element=0.5),
    )
    workload = Workload(micro_batch_size=2, num_micro_batches=5)
    found = dataclasses.replace(bare, profile=profile, workload=workload, modes=(ZDP, DP))
    # 10 samples at 3 s, and 25 elements on two ranks at 0.5 s
    assert found.costs.additive.constant_s == 30 + 6.25
    assert found.costs.additive.fastest_s == pytest.approx(36.25 + 5 * 1.0)


def test_a_gap_without_a_bound_is_none(setting, cluster):
    found = setting(
        operators=chain([100, 100, 100]),
        cluster=cluster(2, seconds_per_byte=0.0),
        workload=Workload(micro_batch_size=1),
    )
    assigned = assign_modes(found, memory_limit_bytes=10**6)
    assert (assigned.step_time_s, assigned.bound_s, assigned.gap) == (0.0, 0.0, 0.0)
