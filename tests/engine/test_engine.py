"""What every engine does, against figure 1 of the paper, and engines as parts of plans."""

import dataclasses

import pytest

from lightning_osdp.assign import Setting
from lightning_osdp.core.modes import ALL_MODES, DP, ZDP
from lightning_osdp.core.plan import Plan
from lightning_osdp.core.search_space import SearchSpace
from lightning_osdp.core.units import partition
from lightning_osdp.core.workload import Workload
from lightning_osdp.engine import AUTO, ENGINES, FSDP1, FSDP2, engine_of
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.scheduler import make_plan
from lightning_osdp.simulation import simulate


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def engine(request):
    return request.param()


def called(model, operator, num_calls):
    """A unit that forward calls so often, after another one."""
    return partition(model(operator("first", 100), operator("m", 100, num_calls=num_calls)), min_unit_bytes=0)[2]


def test_zdp_gathers_in_forward_and_again_in_backward_and_dp_once(engine):
    assert [engine.num_all_gathers(mode) for mode in (ZDP, DP)] == [2, 1]
    assert [engine.num_reduce_scatters(mode) for mode in (ZDP, DP)] == [1, 1]


def test_a_unit_that_forward_calls_again_is_gathered_again_only_if_it_was_freed(model, operator):
    units = [called(model, operator, num_calls) for num_calls in (1, 2, 3)]
    assert [FSDP1().num_all_gathers(ZDP, unit) for unit in units] == [2, 3, 4]
    assert [FSDP1().num_all_gathers(DP, unit) for unit in units] == [1, 1, 1]


def test_with_four_micro_batches_only_dp_that_reduces_in_the_last_gathers_once_a_step(engine):
    collectives = {
        (mode.name, mode.sync): (
            engine.num_all_gathers(mode, num_micro_batches=4),
            engine.num_reduce_scatters(mode, num_micro_batches=4),
        )
        for mode in ALL_MODES
    }
    assert collectives == {
        ("ZDP", "every"): (8, 4),
        ("DP", "every"): (4, 4),
        ("ZDP", "last"): (8, 1),
        ("DP", "last"): (1, 1),
    }


def test_engines_are_found_by_the_names_that_plans_have_for_them(engine, model, cluster):
    assert ENGINES[engine.name] is type(engine)
    other = dataclasses.replace(engine, backward_prefetch="none", forward_prefetch=True)
    plan = make_plan(model(100, 100), cluster(2), memory_limit_bytes=10**6, micro_batch_size=1, engine=other)
    assert plan.engine == engine.name
    assert engine_of(plan) == other


def test_what_is_left_to_choose_competes_where_something_overlaps(engine):
    chosen = dataclasses.replace(engine, backward_prefetch=AUTO, forward_prefetch=True)
    assert engine.alternatives(overlaps=True) == (engine,)
    found = chosen.alternatives(overlaps=True)
    least = {chosen.without_prefetch(each).backward_prefetch for each in found}
    assert least | {each.backward_prefetch for each in found} == set(engine.prefetches)
    assert [each.backward_prefetch for each in chosen.alternatives(overlaps=False)] == ["none"]
    assert all(each.forward_prefetch for each in found)


def test_forward_of_fsdp2_overlaps_by_prefetch_or_without_asynchronous_unsharding():
    chosen = FSDP2(backward_prefetch=AUTO, forward_prefetch=AUTO)
    explicit, implicit = chosen.alternatives(overlaps=True)
    assert explicit == FSDP2(forward_prefetch=True)
    assert implicit == FSDP2(asynchronous_unshard=False)
    assert chosen.without_prefetch(explicit) == FSDP2(backward_prefetch="none")
    assert chosen.without_prefetch(implicit) == FSDP2(backward_prefetch="none", asynchronous_unshard=False)
    assert chosen.alternatives(overlaps=False) == (FSDP2(backward_prefetch="none"),)
    given = FSDP2(forward_prefetch=AUTO, asynchronous_unshard=False)
    assert given.alternatives(overlaps=True) == (implicit,)


def test_fsdp1_gathers_all_units_ahead_or_none():
    chosen = FSDP1(backward_prefetch=AUTO, forward_prefetch=AUTO)
    assert not any(each.forward_prefetch for each in chosen.alternatives(overlaps=True))
    with pytest.raises(ValueError, match="fsdp1 gathers all units ahead or none"):
        FSDP1().gathering_late(["m0"], [])


def test_what_is_left_to_choose_does_not_run(engine, model):
    profile = model(100)
    units = partition(profile, min_unit_bytes=0)
    with pytest.raises(ValueError, match="runs nothing"):
        type(engine)(backward_prefetch=AUTO).events_of(profile, units, [DP, ZDP], 2)
    with pytest.raises(ValueError, match="runs nothing"):
        type(engine)(forward_prefetch=AUTO).events_of(profile, units, [DP, ZDP], 2)


def test_a_prefetch_that_the_engine_has_not_is_refused():
    with pytest.raises(ConfigurationError) as caught:
        FSDP1(backward_prefetch="both")
    assert str(caught.value) == "backward_prefetch must be one of ('pre', 'post', 'none', 'auto'), got 'both'."


def test_fsdp2_gathers_a_unit_at_every_call_but_where_it_is_there(model, operator):
    units = [called(model, operator, num_calls) for num_calls in (1, 2, 3)]
    assert [FSDP2().num_all_gathers(ZDP, unit) for unit in units] == [2, 4, 6]
    assert [FSDP2().num_all_gathers(DP, unit) for unit in units] == [1, 2, 3]
    assert [FSDP2().may_wait(unit) for unit in units] == [True, False, False]


def test_backward_does_not_gather_what_it_does_not_come_to(model, operator):
    profile = model(operator("frozen", 100, frozen=True), operator("m", 100), operator("after", 100, frozen=True))
    units = partition(profile, min_unit_bytes=0)
    assert [FSDP2().num_all_gathers(ZDP, unit) for unit in units[1:]] == [1, 2, 2]


def test_a_unit_that_is_called_again_may_not_wait(model, operator, cluster):
    profile = model(operator("first", 100), operator("m", 100, num_calls=2))
    found = Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=0),
        cluster=cluster(2),
        workload=Workload(micro_batch_size=1, num_micro_batches=2),
        engine=FSDP2(),
    )
    assert [{mode.sync for mode in options} for options in found.options] == [{"every"}, {"every", "last"}, {"every"}]


def test_a_plan_names_its_engine_and_what_was_given(model, cluster):
    options = {"memory_limit_bytes": 10**6, "micro_batch_size": 1}
    plan = make_plan(model(100, 100), cluster(2), engine=FSDP2(asynchronous_unshard=False), **options)
    assert (plan.engine, plan.backward_prefetch, plan.asynchronous_unshard) == ("fsdp2", "pre", False)
    assert Plan.from_json(plan.to_json()) == plan


def test_small_operators_of_a_plan_for_fsdp2_join_a_child_of_the_root(model, operator, cluster):
    profile = model(operator("model.a", 4000), operator("model.ln", 10), operator("model.b", 4000))
    space = SearchSpace(share_units=False, min_unit_bytes=100)
    options = {"memory_limit_bytes": 10**6, "micro_batch_size": 1, "search_space": space}
    for engine, expected in ((FSDP1(), {"": ("model.ln",)}), (FSDP2(), {"": (), "model": ("model.ln",)})):
        units = {unit.name: unit.operators for unit in make_plan(profile, cluster(2), engine=engine, **options).units}
        assert units == {**expected, "model.a": ("model.a",), "model.b": ("model.b",)}


@pytest.mark.parametrize("limit_bytes", [12_500, 13_500, 15_000, 10**6])
def test_the_peak_of_a_plan_for_fsdp2_is_that_of_its_simulated_step(model, operator, cluster, limit_bytes):
    sizes = [400, 800, 1200, 800, 400]
    profile = model(*(operator(f"h.{i // 2}.m{i}", size) for i, size in enumerate(sizes)))
    ring = cluster(2, latency_s=1.0)
    plan = make_plan(
        profile, ring, memory_limit_bytes=limit_bytes, micro_batch_size=1, num_micro_batches=2, engine=FSDP2()
    )
    estimate = simulate(plan, profile, ring)
    assert estimate.peak.peak_bytes == plan.peak_bytes <= limit_bytes
    assert estimate.time_s == pytest.approx(plan.step_time_s)
