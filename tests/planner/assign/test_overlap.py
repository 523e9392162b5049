"""Modes where communication overlaps computing: against brute force, and cases worked out by hand."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.axes import DP, ZDP
from lightning_osdp.core.cluster import Link, Links, UnitOverhead
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting, assign_modes, bound_later_s, solve
from lightning_osdp.planner.assign.paths import Paths
from lightning_osdp.planner.cost import Workload
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.scheduler.planned import plan_of
from tests.support.overlapped import SHARES, made, overlapped
from tests.support.plans import keeping
from tests.support.tiers import examples

LINKS = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), Link(latency_s=0.1, seconds_per_byte=0.01))
NODES = {"world_size": 8, "node_size": 2, "within_node": Links(**LINKS), "between_nodes": Links(**LINKS)}


def fitting(found, share):
    """A limit this share of the way from the least peak to the largest, and the step times of all that fit."""
    every = {modes: found.costs.peak(modes).peak_bytes for modes in itertools.product(*found.costs.options)}
    limit_bytes = int(min(every.values()) + share * (max(every.values()) - min(every.values())))
    return limit_bytes, {modes: found.costs.step_time_s(modes) for modes, peak in every.items() if peak <= limit_bytes}


@examples(150)
@given(case=overlapped(), share=SHARES, worth=st.sampled_from([0.9, math.inf, math.inf]))
def test_modes_fit_and_no_modes_that_fit_are_faster_than_the_bound(model, operator, case, share, worth):
    found = made(model, operator, case)
    limit_bytes, times_s = fitting(found, share)
    best_s = min(times_s.values())
    assigned = assign_modes(found, memory_limit_bytes=limit_bytes, worth_s=worth * best_s)
    assert assigned.peak.peak_bytes <= limit_bytes
    assert assigned.step_time_s == times_s[assigned.modes]
    assert assigned.bound_s <= best_s * (1 + 1e-9)
    assert best_s <= assigned.step_time_s <= times_s[found.costs.least_memory_modes]
    assert assign_modes(found, memory_limit_bytes=limit_bytes, worth_s=worth * best_s) == assigned


@pytest.mark.slow
@examples(150)
@given(case=overlapped(), has_nodes=st.booleans())
def test_every_path_is_a_bound_on_all_modes_and_the_least_one_too(model, operator, case, has_nodes):
    found = made(model, operator, case)
    if has_nodes:
        found = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, **NODES))
    paths = Paths(found)
    every = list(itertools.product(*found.costs.menus))
    every = every[:: max(1, len(every) // 500)]
    for modes in every[:: max(1, len(every) // 8)]:
        for bound in (paths.at(paths.longest(modes)), *paths.means):
            assert all(bound.time_s(others) <= found.costs.step_time_s(others) * (1 + 1e-9) for others in every)
        assert paths.least_s() <= found.costs.step_time_s(modes) * (1 + 1e-9)


@examples(60)
@given(case=overlapped(most=5), share=SHARES, more=st.integers(1, 9), overlaps=st.booleans())
def test_a_bound_holds_for_larger_micro_batches(model, operator, case, share, more, overlaps):
    found = made(model, operator, case)
    found = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, overlaps=overlaps))
    limit_bytes, times_s = fitting(found, share)
    size = found.workload.micro_batch_size + more
    later = found.at(size)
    bound_s = bound_later_s(found, min(times_s.values()), micro_batch_size=size)
    assert bound_s >= min(times_s.values())
    for modes in itertools.product(*later.costs.options):
        if later.costs.peak(modes).peak_bytes <= limit_bytes:
            assert bound_s <= later.costs.step_time_s(modes) * (1 + 1e-9)


IMPLICIT, EXPLICIT = FSDP2(asynchronous_unshard=False), FSDP2(forward_prefetch=True)


@pytest.fixture
def chain(model, operator, cluster):
    """Eight equal operators; a ring takes 1 s, forward ``forward_s`` and backward twice that."""

    def build(forward_s, engine=IMPLICIT):
        operators = (
            operator(f"m{i}", 100, forward_s_per_sample=forward_s, backward_s_per_sample=2 * forward_s)
            for i in range(8)
        )
        profile = model(*operators)
        return Setting(
            profile=profile,
            units=partition(profile, min_unit_bytes=0),
            cluster=dataclasses.replace(cluster(2, seconds_per_byte=0.02), overlaps=True),
            workload=Workload(micro_batch_size=1),
            engine=engine,
        )

    return build


def test_nothing_is_kept_where_computing_hides_everything(chain):
    found = chain(3.0)
    assigned = assign_modes(found, memory_limit_bytes=10**6)
    assert assigned.modes == (DP, *[ZDP] * 8)
    # 8 (3 + 6), the first gather and the last reduce-scatter
    assert (assigned.step_time_s, assigned.gap) == (74.0, 0.0)


def test_what_is_gathered_again_once_forward_is_over_is_kept_where_nothing_else_shows(chain):
    found = chain(3.0, EXPLICIT)
    assert found.costs.step_time_s(found.all_zdp_modes) == 75.0
    assigned = assign_modes(found, memory_limit_bytes=10**6)
    assert assigned.modes == (DP, *[ZDP] * 7, DP)
    assert (assigned.step_time_s, assigned.gap) == (74.0, 0.0)


@pytest.mark.parametrize("engine", [IMPLICIT, EXPLICIT], ids=["implicit", "explicit"])
def test_everything_is_kept_where_collectives_take_longest(chain, engine):
    found = chain(0.1, engine)
    assigned = assign_modes(found, memory_limit_bytes=10**6)
    # 16 collectives, between which the last forward and backward are computed
    assert assigned.step_time_s == pytest.approx(16.0 + 0.3)
    assert assigned.gap == pytest.approx(0.0, abs=1e-9)
    assert sum(mode is ZDP for mode in assigned.modes) == 0


@pytest.mark.parametrize(("forward_s", "saves"), [(3.0, False), (0.1, True)])
def test_what_a_plan_says_that_keeping_saves_is_what_the_step_would(chain, forward_s, saves):
    found = chain(forward_s)
    units = plan_of(assign_modes(found, memory_limit_bytes=10**6), memory_limit_bytes=10**6, space=SearchSpace()).units
    assert all((keeping(unit)[0] > 0.5) == saves for unit in units[1:])
    assert saves or all(keeping(unit)[0] == pytest.approx(0, abs=1e-9) for unit in units)


def test_as_many_are_kept_as_fit_where_collectives_take_longest(chain):
    found = chain(0.1)
    least, most = (found.costs.peak(modes).peak_bytes for modes in (found.all_zdp_modes, (DP,) * 9))
    times_s = [assign_modes(found, memory_limit_bytes=limit).step_time_s for limit in range(least, most + 1, 100)]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] > times_s[-1] + 3.0


def test_where_no_plan_below_the_wanted_time_is_possible_modes_are_not_improved(chain):
    found = chain(3.0)
    assigned = assign_modes(found, memory_limit_bytes=10**6, worth_s=70.0)
    assert (assigned.step_time_s, assigned.bound_s) == (74.0, 74.0)
    with_overhead = dataclasses.replace(
        found, cluster=dataclasses.replace(found.cluster, unit_overhead={"gather": UnitOverhead(fixed_s=1.0)})
    )
    assert assign_modes(with_overhead, memory_limit_bytes=10**6, worth_s=math.inf).modes == (DP,) * 9


def test_nothing_is_solved_exactly_where_that_is_of_no_use(model, cluster, monkeypatch):
    profile = model(*(100 + 37 * index % 89 for index in range(8)))
    found = Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=0),
        cluster=dataclasses.replace(cluster(2, seconds_per_byte=0.02), overlaps=True),
        workload=Workload(micro_batch_size=1),
        engine=EXPLICIT,
    )
    least, most = (found.costs.peak(modes).peak_bytes for modes in (found.all_zdp_modes, (DP,) * 9))
    exact, improve = [], solve.improve
    monkeypatch.setattr(solve, "improve", lambda *args, **kwargs: exact.append(1) or improve(*args, **kwargs))
    limits_bytes = range(least, most, (most - least) // 10)
    for worth_s, is_exact in ((math.inf, True), (1e-9, False)):
        for limit_bytes in limits_bytes:
            assign_modes(found, memory_limit_bytes=limit_bytes, worth_s=worth_s)
        assert bool(exact) == is_exact
        exact.clear()


def test_one_rank_has_nothing_to_overlap(chain):
    alone = chain(1.0)
    alone = dataclasses.replace(alone, cluster=dataclasses.replace(alone.cluster, world_size=1))
    assert not alone.overlaps
    assert assign_modes(alone, memory_limit_bytes=10**6).gap == 0.0
