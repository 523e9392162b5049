"""Units gathered ahead: against brute force over all modes and all lists, and cases worked out by hand."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.axes import DP, ZDP
from lightning_osdp.core.plans.plan import PREFETCH_CHOICES
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting, as_far_as_fits, assign_ahead
from lightning_osdp.planner.cost import Workload
from lightning_osdp.planner.engine import AUTO, FSDP2
from lightning_osdp.planner.scheduler import make_plan
from tests.support.overlapped import SHARES, made, overlapped
from tests.support.tiers import examples

ANY = FSDP2(backward_prefetch=AUTO, forward_prefetch=AUTO)


def families(found, engine):
    """Settings that compete, each with everything gathered ahead that may be."""
    return [
        dataclasses.replace(found, engine=each, least_ahead=engine.without_prefetch(each))
        for each in engine.alternatives(overlaps=True)
    ]


def subsets(names):
    return itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(len(names) + 1))


def with_lists(family):
    """Yields the setting with every list of units gathered late, and the one that gathers as little ahead as may be."""
    names = [unit.name for unit in family.units if not unit.is_root]
    none = [()]
    forward = subsets(names) if family.engine.forward_prefetch != family.least_ahead.forward_prefetch else none
    backward = list(subsets(names)) if family.engine.backward_prefetch != family.least_ahead.backward_prefetch else none
    for lists in itertools.product(forward, backward):
        yield dataclasses.replace(family, engine=family.engine.gathering_late(*lists))
    yield dataclasses.replace(family, engine=family.least_ahead)


def fitting(family, limit_bytes):
    """The step times of all modes with all lists that fit by the closed form."""
    for found in with_lists(family):
        for modes in itertools.product(*found.costs.options):
            if found.costs.peak(modes).peak_bytes <= limit_bytes:
                yield found.costs.step_time_s(modes)


@pytest.mark.slow
@examples(100)
@given(
    case=overlapped(most=4),
    share=SHARES,
    engine=st.sampled_from([ANY, dataclasses.replace(ANY, forward_prefetch=True), FSDP2(forward_prefetch=AUTO)]),
)
def test_no_modes_with_any_units_gathered_ahead_are_faster_than_the_bound(model, operator, case, share, engine):
    found = made(model, operator, case)
    if len(found.units) > 4 and found.workload.num_micro_batches > 1:
        found = found.at(found.workload.micro_batch_size, 1)
    for family in families(found, engine):
        least = family.costs.least_bytes
        most = family.costs.peak((DP,) * len(family.units)).peak_bytes
        limit_bytes = int(least + share * max(0, most - least) * 0.7)
        assigned = assign_ahead(family, memory_limit_bytes=limit_bytes, search="depth_first", worth_s=float("inf"))
        assert assigned is not None
        costs = assigned.setting.costs
        assert costs.exact_peak(assigned.modes).peak_bytes <= limit_bytes
        assert assigned.step_time_s == costs.step_time_s(assigned.modes)
        assert assigned.bound_s <= assigned.step_time_s * (1 + 1e-9)
        assert assigned.bound_s <= min(fitting(family, limit_bytes)) * (1 + 1e-9)


@examples(60)
@given(case=overlapped(most=4), late=st.lists(st.booleans(), min_size=8, max_size=8))
def test_to_gather_late_takes_no_more_bytes_and_to_gather_ahead_no_more_time(model, operator, case, late):
    found = made(model, operator, case)
    for family in families(found, ANY):
        names = [unit.name for unit in family.units if not unit.is_root]
        forward = [name for name, is_late in zip(names, late[:4], strict=False) if is_late]
        backward = [name for name, is_late in zip(names, late[4:], strict=False) if is_late]
        some = dataclasses.replace(family, engine=family.engine.gathering_late(forward, backward))
        none = dataclasses.replace(family, engine=family.least_ahead)
        for modes in itertools.islice(itertools.product(*family.costs.options), 64):
            assert (
                family.ahead_for_free.costs.peak(modes).peak_bytes
                == none.costs.peak(modes).peak_bytes
                <= some.costs.peak(modes).peak_bytes
            )
            assert none.costs.exact_peak(modes).peak_bytes <= some.costs.exact_peak(modes).peak_bytes
            assert family.costs.step_time_s(modes) <= some.costs.step_time_s(modes) * (1 + 1e-9)


@examples(60)
@given(case=overlapped(most=4), prefetch=st.sampled_from(PREFETCH_CHOICES))
def test_where_all_gathers_are_synchronous_gathering_ahead_in_forward_is_no_better(model, operator, case, prefetch):
    """Shows why gathering ahead in forward is not offered there."""
    found = dataclasses.replace(made(model, operator, case), engine=FSDP2(asynchronous_unshard=False))
    implicit = dataclasses.replace(found, engine=dataclasses.replace(found.engine, backward_prefetch=prefetch))
    both = dataclasses.replace(implicit, engine=dataclasses.replace(implicit.engine, forward_prefetch=True))
    for modes in itertools.islice(itertools.product(*found.costs.options), 64):
        assert implicit.costs.exact_peak(modes).peak_bytes <= both.costs.exact_peak(modes).peak_bytes
        assert implicit.costs.step_time_s(modes) <= both.costs.step_time_s(modes) * (1 + 1e-9)


@examples(60)
@given(case=overlapped(most=4), prefetch=st.sampled_from(PREFETCH_CHOICES))
def test_where_nothing_overlaps_asynchronous_all_gathers_are_as_fast_and_take_no_more(model, operator, case, prefetch):
    """Shows why synchronous all-gathers are not offered there."""
    found = made(model, operator, case)
    found = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, overlaps=False))
    asynchronous, synchronous = (
        dataclasses.replace(found, engine=FSDP2(backward_prefetch=prefetch, asynchronous_unshard=each))
        for each in (True, False)
    )
    for modes in itertools.islice(itertools.product(*asynchronous.costs.options), 64):
        assert asynchronous.costs.step_time_s(modes) == synchronous.costs.step_time_s(modes)
        assert asynchronous.costs.exact_peak(modes).peak_bytes <= synchronous.costs.exact_peak(modes).peak_bytes


@pytest.fixture
def giant(model, operator, cluster):
    """Eight operators, the fifth five times as large; gathers take as long as forward."""

    def build(**fields):
        sizes = [100, 100, 100, 100, 500, 100, 100, 100]
        operators = (
            operator(f"m{i}", size, forward_s_per_sample=size / 100, backward_s_per_sample=2 * size / 100)
            for i, size in enumerate(sizes)
        )
        profile = model(*operators)
        return Setting(
            profile=profile,
            units=partition(profile, min_unit_bytes=0),
            cluster=dataclasses.replace(cluster(2, seconds_per_byte=0.02), overlaps=True),
            workload=Workload(micro_batch_size=1),
            **fields,
        )

    return build


def test_where_one_buffer_does_not_fit_only_that_unit_is_gathered_late(giant):
    family = families(giant(), ANY)[0]
    modes = family.all_zdp_modes
    late = as_far_as_fits(family, modes, memory_limit_bytes=family.costs.exact_peak(modes).peak_bytes - 1)
    assert set(late.engine.late_forward) | set(late.engine.late_backward) <= {"m3", "m4", "m5"}
    assert len(late.engine.late_forward) + len(late.engine.late_backward) == 1
    none = dataclasses.replace(family, engine=family.least_ahead)
    assert family.costs.step_time_s(modes) < late.costs.step_time_s(modes) < none.costs.step_time_s(modes)
    assert as_far_as_fits(family, modes, memory_limit_bytes=none.costs.exact_peak(modes).peak_bytes - 1) is None
    assert as_far_as_fits(family, modes, memory_limit_bytes=family.costs.exact_peak(modes).peak_bytes) == family


def test_a_plan_says_which_units_are_gathered_late(giant):
    family = families(giant(), ANY)[0]
    limit_bytes = family.costs.exact_peak(family.all_zdp_modes).peak_bytes - 1
    plan = make_plan(family.profile, family.cluster, memory_limit_bytes=limit_bytes, micro_batch_size=1, engine=ANY)
    assert plan.backward_prefetch == "pre"
    assert plan.late_forward or plan.late_backward
    assert plan.peak_bytes <= limit_bytes
    wide = make_plan(family.profile, family.cluster, memory_limit_bytes=10**6, micro_batch_size=1, engine=ANY)
    assert (wide.late_forward, wide.late_backward) == ((), ())
    assert wide.step_time_s < plan.step_time_s


def test_settings_that_a_user_gives_stay(giant):
    family = families(giant(), FSDP2(backward_prefetch="pre", forward_prefetch=True))[0]
    assert (family.least_ahead, family.ahead_for_free) == (family.engine, family)
    assert [each.engine for each in families(giant(), FSDP2(backward_prefetch=AUTO))] == [FSDP2()]
    backward = families(giant(), FSDP2(backward_prefetch=AUTO))[0]
    assert (
        as_far_as_fits(backward, (DP, *[ZDP] * 8), memory_limit_bytes=backward.costs.least_bytes).engine.late_forward
        == ()
    )
