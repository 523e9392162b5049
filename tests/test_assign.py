"""Modes against brute force over all of them under the closed form of the peak."""

import dataclasses
import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.assign import Setting, assign_modes
from lightning_osdp.assign.nested import Price, improve
from lightning_osdp.assign.repair import fill, repair
from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.core.units import partition
from lightning_osdp.cost import Workload, peak_memory
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.search import SOLVERS

EXACT = [name for name in SOLVERS if name != "greedy"]


@st.composite
def settings_to_plan(draw):
    """Profile fields and the rest of a `Setting`: up to nine units, some of them equal, some in containers."""
    num_bytes = st.integers(0, 400)
    sizes = draw(st.lists(st.integers(1, 500), min_size=1, max_size=3))
    names = [""]
    for index in range(draw(st.integers(0, 8))):
        names.append(f"{draw(st.sampled_from(names))}.{index}".strip("."))
    operators = [
        {
            "name": name,
            "parameter_bytes": draw(st.sampled_from(sizes) | st.integers(1, 500)),
            "frozen": draw(st.sampled_from([False, False, False, True])),
            "num_calls": draw(st.sampled_from([1, 1, 1, 2])),
            "activation_bytes_per_sample": draw(num_bytes),
            "forward_workspace_bytes_per_sample": draw(num_bytes),
            "backward_workspace_bytes_per_sample": draw(num_bytes),
            "forward_s_per_sample": draw(st.sampled_from([0.0, 0.3])),
        }
        for name in names[draw(st.integers(0, 1)) :]
    ]
    link = st.builds(
        Link, latency_s=st.sampled_from([0.0, 0.01, 1.0]), seconds_per_byte=st.sampled_from([0.0, 0.001, 0.0123])
    )
    return {
        "operators": operators,
        "loss_activation_bytes_per_sample": draw(num_bytes),
        "min_unit_bytes": draw(st.sampled_from([0, 100])),
        "cluster": Cluster(
            world_size=draw(st.sampled_from([1, 2, 3, 8])), all_gather=draw(link), reduce_scatter=draw(link)
        ),
        "workload": Workload(micro_batch_size=draw(st.integers(1, 3)), num_micro_batches=draw(st.integers(1, 2))),
        "backward_prefetch": draw(st.sampled_from(["pre", "post", "none"])),
        "forward_prefetch": draw(st.booleans()),
        "modes": draw(st.sampled_from([("ZDP", "DP"), ("ZDP", "DP"), ("ZDP",), ("DP",)])),
    }


@pytest.fixture(scope="session")
def setting(model, operator):
    def build(*, operators, min_unit_bytes=0, loss_activation_bytes_per_sample=0.0, **fields):
        profile = model(
            *(operator(**made) for made in operators),
            loss_activation_bytes_per_sample=loss_activation_bytes_per_sample,
        )
        return Setting(profile=profile, units=partition(profile, min_unit_bytes=min_unit_bytes), **fields)

    return build


def every_assignment(found):
    """Peak and step time of each, straight from the closed form."""
    arguments = {
        "world_size": found.cluster.world_size,
        "workload": found.workload,
        "backward_prefetch": found.backward_prefetch,
        "forward_prefetch": found.forward_prefetch,
    }
    return [
        (peak_memory(found.profile, found.units, modes, **arguments).peak_bytes, found.step_time_s(modes))
        for modes in itertools.product(*found.options)
    ]


def limits_between(assignments, shares=(-0.01, 0.0, 0.2, 0.5, 0.8, 1.0)):
    """Limits from below the least peak to the largest, rising."""
    least, most = min(assignments)[0], max(assignments)[0]
    return [int(least + share * (most - least)) - (share < 0) for share in shares]


@pytest.mark.parametrize("search", SOLVERS)
@settings(deadline=None, max_examples=60)
@given(case=settings_to_plan())
def test_the_plan_fits_and_the_bound_is_below_the_optimum(setting, search, case):
    found = setting(**case)
    assignments = every_assignment(found)
    for limit_bytes in limits_between(assignments):
        fitting = [time_s for peak_bytes, time_s in assignments if peak_bytes <= limit_bytes]
        assigned = assign_modes(found, limit_bytes=limit_bytes, search=search)
        assert (assigned is None) == (not fitting)
        if assigned is None:
            continue
        assert assigned.peak == found.peak(assigned.modes)
        assert assigned.peak.peak_bytes <= limit_bytes
        assert assigned.step_time_s == found.step_time_s(assigned.modes)
        assert assigned.bound_s <= min(fitting) * (1 + 1e-12)
        assert min(fitting) <= assigned.step_time_s * (1 + 1e-12)
        assert assigned.gap >= 0
        assert all(mode in options for mode, options in zip(assigned.modes, found.options, strict=True))


@pytest.mark.parametrize("search", EXACT)
@settings(deadline=None, max_examples=60)
@given(case=settings_to_plan())
def test_exact_solvers_prove_small_plans_best_and_more_memory_is_never_slower(setting, search, case):
    found = setting(**case)
    assignments = every_assignment(found)
    times_s = []
    for limit_bytes in limits_between(assignments)[1:]:
        assigned = assign_modes(found, limit_bytes=limit_bytes, search=search)
        best_s = min(time_s for peak_bytes, time_s in assignments if peak_bytes <= limit_bytes)
        assert assigned.step_time_s == pytest.approx(best_s, rel=1e-11)
        assert (assigned.gap, assigned.note) == (0.0, "")
        times_s.append(assigned.step_time_s)
    assert all(more <= less * (1 + 1e-11) for less, more in itertools.pairwise(times_s))


@settings(deadline=None, max_examples=60)
@given(case=settings_to_plan())
def test_with_greedy_more_memory_is_slower_by_no_more_than_the_gap(setting, case):
    found = setting(**case)
    limits = limits_between(every_assignment(found))[1:]
    for less, more in itertools.pairwise(assign_modes(found, limit_bytes=each, search="greedy") for each in limits):
        assert more.step_time_s <= less.step_time_s * (1 + more.gap) * (1 + 1e-12)


def chain(sizes, **fields):
    return [{"name": f"m{index}", "parameter_bytes": size, **fields} for index, size in enumerate(sizes)]


@pytest.fixture(scope="session")
def two_ranks(cluster):
    return {"cluster": cluster(2, seconds_per_byte=0.01), "workload": Workload(micro_batch_size=1)}


def test_one_rank_has_nothing_to_choose(setting, cluster):
    found = setting(operators=chain([100, 200]), cluster=cluster(1), workload=Workload(micro_batch_size=1))
    least = found.peak(found.least_memory_modes).peak_bytes
    assigned = assign_modes(found, limit_bytes=least)
    assert (assigned.gap, assigned.step_time_s) == (0.0, found.fastest_s)
    assert assign_modes(found, limit_bytes=least - 1) is None


def test_everything_is_kept_where_it_fits_and_nothing_where_nothing_does(setting, two_ranks):
    found = setting(operators=chain([100, 200, 300, 400]), **two_ranks)
    most = found.peak((DP,) * 5).peak_bytes
    assert assign_modes(found, limit_bytes=most).modes == (DP,) * 5
    # 3/2 S against 1 S seconds of S bytes at 0.01 s: 1.5 * 10 and 1.0 * 10
    assert assign_modes(found, limit_bytes=most).step_time_s == pytest.approx(10.0)
    least = found.peak(found.all_zdp_modes).peak_bytes
    assert assign_modes(found, limit_bytes=least - 1) is None


def test_of_equal_operators_the_later_ones_are_kept(setting, two_ranks):
    # base 900; while five are freed fwd(m5) 900+300 +100 +300 = 1600, while four are bwd(m5) 900 +200 +200 +300 = 1600,
    # when all six are the loss 1500: at the least peak the last one is kept for nothing, each further one takes 100
    found = setting(operators=chain([100] * 6, activation_bytes_per_sample=50), **two_ranks)
    assert found.peak(found.all_zdp_modes).peak_bytes == 1600
    for limit_bytes, expected in [
        (1600, "ZZZZZD"),
        (1700, "ZZZZDD"),
        (1800, "ZZZDDD"),
        (2099, "ZDDDDD"),
        (2100, "DDDDDD"),
    ]:
        modes = assign_modes(found, limit_bytes=limit_bytes).modes
        assert "".join(mode.name[0] for mode in modes[1:]) == expected


def test_a_binding_moment_other_than_the_last_forward_is_proven_too(setting, two_ranks):
    # the peak is where m2's backward runs: m1 is prefetched then, and only m0 may be freed
    found = setting(operators=chain([10, 20, 1000, 30, 40]), **two_ranks)
    assigned = assign_modes(found, limit_bytes=found.peak(found.all_zdp_modes).peak_bytes)
    assert (assigned.peak.phase, assigned.peak.operator) == ("backward", "m2")
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
    least, most = found.peak(found.all_zdp_modes).peak_bytes, found.peak((DP,) * 401).peak_bytes
    assigned = assign_modes(found, limit_bytes=(9 * least + most) // 10)
    assert 0 < assigned.gap < 1e-3
    text, _, rest = assigned.note.partition(" nodes: ")
    assert text.startswith("depth_first stopped after 300,")
    assert rest == "the best plan that was found, not proven to be the best."


@pytest.mark.parametrize(("num_units", "most_s"), [(400, 3.0), (3000, 4.0)])
def test_thousands_of_distinct_operators_take_about_a_second(setting, cluster, num_units, most_s):
    draw = random.Random(1)
    operators = chain([4 * int(10 ** draw.uniform(5, 7)) for _ in range(num_units)])
    found = setting(
        operators=operators,
        cluster=cluster(8, latency_s=2e-5, seconds_per_byte=1e-10),
        workload=Workload(micro_batch_size=2),
    )
    limit_bytes = sum(made["parameter_bytes"] for made in operators)
    start_s = time.perf_counter()
    assigned = assign_modes(found, limit_bytes=limit_bytes)
    assert time.perf_counter() - start_s < most_s
    assert assigned.gap < 1e-3


def test_exhaustive_refuses_many_units(setting, two_ranks):
    found = setting(operators=chain([100 + index for index in range(40)], activation_bytes_per_sample=1), **two_ranks)
    least, most = found.peak(found.all_zdp_modes).peak_bytes, found.peak((DP,) * 41).peak_bytes
    with pytest.raises(ConfigurationError, match="search='exhaustive' expects a problem with at most 100,000"):
        assign_modes(found, limit_bytes=(least + most) // 2, search="exhaustive")


@settings(deadline=None, max_examples=60)
@given(case=settings_to_plan(), share=st.floats(0, 1))
def test_repaired_modes_fit_and_filled_ones_are_no_slower(setting, case, share):
    found = setting(**case | {"modes": ("ZDP", "DP")})
    least, most = (found.peak(modes).peak_bytes for modes in (found.all_zdp_modes, (DP,) * len(found.units)))
    limit_bytes = int(least + share * (most - least))
    rooms = found.memory.room_bytes(limit_bytes)
    repaired = repair(found, found.fastest_modes, rooms)
    filled = fill(found, repaired, rooms)
    assert found.peak(repaired).peak_bytes <= limit_bytes
    assert found.peak(filled).peak_bytes <= limit_bytes
    assert found.step_time_s(filled) <= found.step_time_s(repaired)
    for unit, mode in enumerate(filled):
        if mode is ZDP and found.saved_s(unit) > 0:  # nothing that would fit is left out
            one_more = (*filled[:unit], DP, *filled[unit + 1 :])
            assert found.peak(one_more).peak_bytes > limit_bytes


@settings(deadline=None, max_examples=60)
@given(
    case=settings_to_plan(),
    share=st.floats(0, 1),
    prices=st.lists(st.tuples(st.integers(0, 9), st.floats(0, 0.1)), max_size=3),
    max_states=st.sampled_from([1, 10, 30, 1000]),
)
def test_the_nested_search_is_exact_or_its_bound_is_valid(setting, case, share, prices, max_states):
    found = setting(**case | {"modes": ("ZDP", "DP")})
    assignments = every_assignment(found)
    (limit_bytes,) = limits_between(assignments, shares=(share,))
    best_s = min(time_s for peak_bytes, time_s in assignments if peak_bytes <= limit_bytes)
    rooms = found.memory.room_bytes(limit_bytes)
    known = [Price(min(k, len(found.memory.order)), price) for k, price in prices]
    modes, bound_s = improve(found, found.all_zdp_modes, rooms, prices=known, max_states=max_states)
    assert found.peak(modes).peak_bytes <= limit_bytes
    assert bound_s <= best_s * (1 + 1e-11)
    if max_states == 1000 and len(found.memory.order) <= 6:  # no more than 64 states
        assert found.step_time_s(modes) == pytest.approx(best_s, rel=1e-11)
        assert bound_s == pytest.approx(best_s, rel=1e-11)


def test_what_a_setting_says_of_plain_fsdp_does_not_depend_on_what_is_offered(setting, two_ranks):
    every, one = (setting(operators=chain([100, 200]), modes=modes, **two_ranks) for modes in (("ZDP", "DP"), ("DP",)))
    assert every.all_zdp_modes == one.all_zdp_modes == (DP, ZDP, ZDP)
    # 3 * 1/2 * 300 * 0.01 s, and a third of it is saved by DP
    assert one.step_time_s(one.all_zdp_modes) == pytest.approx(4.5)
    assert [one.saved_s(unit) for unit in range(3)] == pytest.approx([0.0, 0.5, 1.0])


def test_what_no_unit_owns_is_part_of_every_step(setting, two_ranks):
    bare = setting(operators=chain([100]), **two_ranks)
    profile = dataclasses.replace(bare.profile, other_s_per_sample=3.0, optimizer_s_per_element=0.5)
    found = dataclasses.replace(bare, profile=profile, workload=Workload(micro_batch_size=2, num_micro_batches=5))
    # 10 samples at 3 s, and 25 elements on two ranks at 0.5 s
    assert found.constant_s == 30 + 6.25
    assert found.fastest_s == pytest.approx(36.25 + 5 * 1.0)


def test_a_gap_without_a_bound_is_none(setting, cluster):
    found = setting(
        operators=chain([100, 100, 100]),
        cluster=cluster(2, seconds_per_byte=0.0),
        workload=Workload(micro_batch_size=1),
    )
    assigned = assign_modes(found, limit_bytes=10**6)
    assert (assigned.step_time_s, assigned.bound_s, assigned.gap) == (0.0, 0.0, 0.0)
