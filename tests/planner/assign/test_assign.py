"""Modes against brute force over all of them under the closed form of the peak."""

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.axes import ALL_MODES, DP, ZDP, modes_of
from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.planner.assign import assign_modes, fill_spare
from lightning_osdp.planner.assign.nested import Price, improve
from lightning_osdp.planner.assign.solve import fill, repair
from lightning_osdp.planner.cost import Workload, step_memory
from lightning_osdp.planner.search import SOLVERS
from tests.support.engines import ENGINES
from tests.support.tiers import examples

EXACT = [name for name in SOLVERS if name != "greedy"]


@st.composite
def settings_to_plan(draw):
    """Profile fields and the rest of a `Setting`: up to nine units, some of them equal, some in containers."""
    num_bytes = st.integers(0, 400)
    sizes = draw(st.lists(st.integers(1, 500), min_size=1, max_size=3))
    num_micro_batches = draw(st.sampled_from([1, 1, 2, 3]))
    names = [""]
    for index in range(draw(st.integers(0, 8 if num_micro_batches == 1 else 3))):  # four modes each, not two
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
        "workload": Workload(micro_batch_size=draw(st.integers(1, 3)), num_micro_batches=num_micro_batches),
        "engine": draw(ENGINES),
        "modes": draw(st.sampled_from([ALL_MODES, ALL_MODES, modes_of(["ZDP"]), modes_of(["DP"])])),
    }


class Every(NamedTuple):
    """Numbers of one assignment."""

    bound_bytes: int
    """Peak by the closed form, computed directly."""
    time_s: float
    peak_bytes: int
    """Peak by the simulated step."""


def every_assignment(found):
    """Returns the numbers of all assignments."""
    memory = step_memory(found, engine=found.engine)
    return [
        Every(memory.peak(modes).peak_bytes, found.costs.step_time_s(modes), found.costs.exact_peak(modes).peak_bytes)
        for modes in itertools.product(*found.costs.options)
    ]


def fastest(assignments, limit_bytes):
    """Returns the least step time of what fits by the closed form, and of what fits by the simulation."""
    return tuple(
        min(each.time_s for each in assignments if each[which] <= limit_bytes)
        for which in (Every._fields.index("bound_bytes"), Every._fields.index("peak_bytes"))
    )


def limits_between(assignments, shares=(-0.01, 0.0, 0.2, 0.5, 0.8, 1.0)):
    """Limits from below the least peak to the largest, rising."""
    least, most = min(assignments).bound_bytes, max(assignments).bound_bytes
    return [int(least + share * (most - least)) - (share < 0) for share in shares]


@pytest.mark.parametrize("search", SOLVERS)
@examples(60)
@given(case=settings_to_plan())
def test_the_plan_fits_and_the_bound_is_below_the_optimum(setting, search, case):
    found = setting(**case)
    assignments = every_assignment(found)
    for limit_bytes in limits_between(assignments):
        assigned = assign_modes(found, memory_limit_bytes=limit_bytes, search=search)
        assert (assigned is None) == all(each.bound_bytes > limit_bytes for each in assignments)
        if assigned is None:
            continue
        bound_s, best_s = fastest(assignments, limit_bytes)
        assert assigned.peak == found.costs.peak(assigned.modes)
        assert assigned.peak.peak_bytes <= limit_bytes
        assert assigned.step_time_s == found.costs.step_time_s(assigned.modes)
        assert assigned.bound_s <= bound_s * (1 + 1e-12)
        assert bound_s <= assigned.step_time_s * (1 + 1e-12)
        filled = fill_spare(assigned, memory_limit_bytes=limit_bytes)
        assert filled.peak == found.costs.exact_peak(filled.modes)
        assert filled.peak.peak_bytes <= limit_bytes
        assert filled.step_time_s == found.costs.step_time_s(filled.modes)
        assert best_s * (1 - 1e-12) <= filled.step_time_s <= assigned.step_time_s
        assert assigned.gap >= 0
        assert all(mode in options for mode, options in zip(assigned.modes, found.costs.options, strict=True))


@pytest.mark.parametrize("search", EXACT)
@examples(60)
@given(case=settings_to_plan())
def test_exact_solvers_prove_small_plans_best_and_more_memory_is_never_slower(setting, search, case):
    found = setting(**case)
    assignments = every_assignment(found)
    times_s = []
    for limit_bytes in limits_between(assignments)[1:]:
        assigned = assign_modes(found, memory_limit_bytes=limit_bytes, search=search)
        bound_s, _ = fastest(assignments, limit_bytes)
        assert assigned.step_time_s == pytest.approx(bound_s, rel=1e-11)
        assert (assigned.gap, assigned.note) == (0.0, "")
        times_s.append(assigned.step_time_s)
    assert all(more <= less * (1 + 1e-11) for less, more in itertools.pairwise(times_s))


@examples(60)
@given(case=settings_to_plan())
def test_with_greedy_more_memory_is_slower_by_no_more_than_the_gap(setting, case):
    found = setting(**case)
    limits = limits_between(every_assignment(found))[1:]
    for less, more in itertools.pairwise(
        assign_modes(found, memory_limit_bytes=each, search="greedy") for each in limits
    ):
        assert more.step_time_s <= less.step_time_s * (1 + more.gap) * (1 + 1e-12)


@examples(60)
@given(case=settings_to_plan(), share=st.floats(0, 1))
def test_repaired_modes_fit_and_filled_ones_are_no_slower(setting, case, share):
    found = setting(**case | {"modes": ALL_MODES})
    least, most = (found.costs.peak(modes).peak_bytes for modes in (found.all_zdp_modes, (DP,) * len(found.units)))
    limit_bytes = int(least + share * (most - least))
    rooms = found.costs.memory.room_bytes(limit_bytes)
    repaired = repair(found.costs.additive, found.costs.additive.fastest_modes, rooms)
    filled = fill(found.costs.additive, repaired, rooms)
    assert found.costs.peak(repaired).peak_bytes <= limit_bytes
    assert found.costs.peak(filled).peak_bytes <= limit_bytes
    assert found.costs.step_time_s(filled) <= found.costs.step_time_s(repaired)
    for unit, mode in enumerate(filled):
        times_s = found.costs.times_s[unit]
        if mode is ZDP and times_s[ZDP] > times_s[DP]:  # nothing that would fit is left out
            one_more = (*filled[:unit], DP, *filled[unit + 1 :])
            assert found.costs.peak(one_more).peak_bytes > limit_bytes


@examples(60)
@given(
    case=settings_to_plan(),
    share=st.floats(0, 1),
    prices=st.lists(st.tuples(st.integers(0, 9), st.floats(0, 0.1)), max_size=3),
    width=st.sampled_from([1, 3, 10, 1000]),
)
def test_the_nested_search_is_exact_or_its_bound_is_valid(setting, case, share, prices, width):
    found = setting(**case | {"modes": ALL_MODES})
    assignments = every_assignment(found)
    (limit_bytes,) = limits_between(assignments, shares=(share,))
    best_s, _ = fastest(assignments, limit_bytes)
    rooms = found.costs.memory.room_bytes(limit_bytes)
    known = [Price(min(k, len(found.costs.memory.order)), price) for k, price in prices]
    modes, bound_s = improve(found.costs.additive, found.all_zdp_modes, rooms, prices=known, width=width)
    assert found.costs.peak(modes).peak_bytes <= limit_bytes
    assert bound_s <= best_s * (1 + 1e-11)
    if width == 1000:
        assert found.costs.step_time_s(modes) == pytest.approx(best_s, rel=1e-11)
        assert bound_s == pytest.approx(best_s, rel=1e-11)
