"""Engine against figure 1 of the paper, and its settings as parts of plans."""

import dataclasses

import pytest

from lightning_osdp.core.axes import ALL_MODES, DP, RESIDENT, ZDP
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.step import Workload
from lightning_osdp.core.units import partition
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.assign import Setting
from lightning_osdp.planner.engine import AUTO, DEFAULT, FSDP2, effects_of, engine_of, num_all_gathers
from lightning_osdp.planner.scheduler import make_plan
from lightning_osdp.planner.simulation import simulate
from tests.support.steps import step_of


def called(model, operator, num_calls):
    """A unit that forward calls so often, after another one."""
    return partition(model(operator("first", 100), operator("m", 100, num_calls=num_calls)), min_unit_bytes=0)[2]


def collectives(mode, unit=None, num_micro_batches=1):
    """Counts all-gathers and reductions of a step."""
    counts = effects_of(mode).counts(unit, num_micro_batches=num_micro_batches)
    return num_all_gathers(counts), counts["reduce"]


def num_gathers(mode, unit):
    return collectives(mode, unit)[0]


def test_zdp_gathers_in_forward_and_again_in_backward_and_dp_once():
    assert [collectives(mode) for mode in (ZDP, DP)] == [(2, 1), (1, 1)]


def test_with_four_micro_batches_only_dp_that_reduces_in_the_last_gathers_once_a_step():
    found = {(mode.name, mode["sync"]): collectives(mode, num_micro_batches=4) for mode in ALL_MODES}
    assert found == {
        ("ZDP", "every"): (8, 4),
        ("DP", "every"): (4, 4),
        ("ZDP", "last"): (8, 1),
        ("DP", "last"): (1, 1),
    }


@pytest.mark.parametrize("settings", [{}, {"asynchronous_unshard": False, "backward_prefetch": "none"}])
def test_a_plan_has_the_settings_that_were_given(settings, model, cluster):
    engine = FSDP2(**settings)
    plan = make_plan(model(100, 100), cluster(2), memory_limit_bytes=10**6, micro_batch_size=1, engine=engine)
    assert engine_of(plan) == engine
    assert engine_of(Plan.from_json(plan.to_json())) == engine


def test_what_runs_where_nothing_is_said_is_what_a_plan_of_no_settings_says(model, cluster):
    plan = make_plan(model(100, 100), cluster(2), memory_limit_bytes=10**6, micro_batch_size=1)
    defaults = {field.name: field.default for field in dataclasses.fields(Plan)}
    unsaid = dataclasses.replace(plan, **{name: defaults[name] for name in dataclasses.asdict(DEFAULT)})
    assert engine_of(unsaid) == DEFAULT == FSDP2()


def test_what_is_left_to_choose_competes_where_something_overlaps():
    chosen = FSDP2(backward_prefetch=AUTO, forward_prefetch=True)
    found = chosen.alternatives(overlaps=True)
    assert found == (FSDP2(forward_prefetch=True),)
    assert chosen.without_prefetch(found[0]) == FSDP2(backward_prefetch="none", forward_prefetch=True)
    assert chosen.alternatives(overlaps=False) == (FSDP2(backward_prefetch="none", forward_prefetch=True),)
    assert FSDP2().alternatives(overlaps=False) == FSDP2().alternatives(overlaps=True) == (FSDP2(),)


def test_forward_overlaps_by_prefetch_or_without_asynchronous_unsharding():
    chosen = FSDP2(backward_prefetch=AUTO, forward_prefetch=AUTO)
    explicit, implicit = chosen.alternatives(overlaps=True)
    assert explicit == FSDP2(forward_prefetch=True)
    assert implicit == FSDP2(asynchronous_unshard=False)
    assert chosen.without_prefetch(explicit) == FSDP2(backward_prefetch="none")
    assert chosen.without_prefetch(implicit) == FSDP2(backward_prefetch="none", asynchronous_unshard=False)
    assert chosen.alternatives(overlaps=False) == (FSDP2(backward_prefetch="none"),)
    given = FSDP2(forward_prefetch=AUTO, asynchronous_unshard=False)
    assert given.alternatives(overlaps=True) == (implicit,)
    # without streams the host waits for what is synchronous
    assert chosen.alternatives(overlaps=True, has_streams=False) == (explicit,)
    blocking = FSDP2(backward_prefetch=AUTO, forward_prefetch=AUTO, asynchronous_unshard=False)
    assert blocking.alternatives(overlaps=True, has_streams=False) == blocking.alternatives(overlaps=False)


def test_what_is_left_to_choose_does_not_run(model):
    step = step_of(model(100))
    for engine in (FSDP2(backward_prefetch=AUTO), FSDP2(forward_prefetch=AUTO)):
        with pytest.raises(ValueError, match="runs nothing"):
            engine.events_of(step, [DP, ZDP])


@pytest.mark.parametrize("prefetch", ["both", "post"])
def test_a_prefetch_that_the_engine_has_not_is_refused(prefetch):
    with pytest.raises(ConfigurationError) as caught:
        FSDP2(backward_prefetch=prefetch)
    assert str(caught.value) == f"backward_prefetch must be one of ('pre', 'none', 'auto'), got {prefetch!r}."


def test_a_unit_is_gathered_at_every_call_but_where_it_is_there(model, operator):
    units = [called(model, operator, num_calls) for num_calls in (1, 2, 3)]
    assert [num_gathers(ZDP, unit) for unit in units] == [2, 4, 6]
    assert [num_gathers(DP, unit) for unit in units] == [1, 2, 3]
    assert [FSDP2().may_wait(unit) for unit in units] == [True, False, False]


def test_backward_does_not_gather_what_it_does_not_come_to(model, operator):
    profile = model(operator("frozen", 100, frozen=True), operator("m", 100), operator("after", 100, frozen=True))
    units = partition(profile, min_unit_bytes=0)
    assert [num_gathers(ZDP, unit) for unit in units[1:]] == [1, 2, 2]


@pytest.mark.parametrize("mode", [*ALL_MODES, RESIDENT])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_a_frozen_unit_reduces_nothing(mode, num_micro_batches, model, operator):
    _, trained, frozen = partition(
        model(operator("m", 100), operator("frozen", 100, frozen=True, gradient_bytes=0)), min_unit_bytes=0
    )
    planned = Unit(name="frozen", operators=("frozen",), kind="", treatments=(mode,), gradient_bytes=0)
    number = {"num_micro_batches": num_micro_batches}
    gathers, reductions = collectives(mode, trained, **number)
    assert collectives(mode, frozen, **number) == collectives(mode, planned, **number) == (gathers, 0)
    assert collectives(mode, dataclasses.replace(planned, gradient_bytes=None), **number) == (gathers, reductions)
    assert reductions > 0
    unread = dataclasses.replace(planned, is_read=False)
    assert collectives(mode, unread, **number)[0] == gathers / (2 if mode["keep"] == "nothing" else 1)


def test_a_unit_that_is_called_again_may_not_wait(model, operator, cluster):
    profile = model(operator("first", 100), operator("m", 100, num_calls=2))
    found = Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=0),
        cluster=cluster(2),
        workload=Workload(micro_batch_size=1, num_micro_batches=2),
    )
    assert [{mode["sync"] for mode in options} for options in found.costs.options] == [
        {"every"},
        {"every", "last"},
        {"every"},
    ]


def test_small_operators_of_a_plan_join_a_child_of_the_root(model, operator, cluster):
    profile = model(operator("model.a", 4000), operator("model.ln", 10), operator("model.b", 4000))
    space = SearchSpace(share_units=False, min_unit_bytes=100)
    plan = make_plan(profile, cluster(2), memory_limit_bytes=10**6, micro_batch_size=1, search_space=space)
    units = {unit.name: unit.operators for unit in plan.units}
    assert units == {"": (), "model": ("model.ln",), "model.a": ("model.a",), "model.b": ("model.b",)}


@pytest.mark.parametrize("limit_bytes", [12_500, 13_500, 15_000, 10**6])
@pytest.mark.parametrize("engine", [FSDP2(), FSDP2(asynchronous_unshard=False)], ids=["explicit", "implicit"])
def test_the_peak_of_a_plan_is_that_of_its_simulated_step(model, operator, cluster, limit_bytes, engine):
    sizes = [400, 800, 1200, 800, 400]
    profile = model(*(operator(f"h.{i // 2}.m{i}", size) for i, size in enumerate(sizes)))
    ring = cluster(2, latency_s=1.0)
    plan = make_plan(
        profile, ring, memory_limit_bytes=limit_bytes, micro_batch_size=BatchPolicy.fixed(1, 2), engine=engine
    )
    estimate = simulate(plan, profile, ring)
    assert estimate.peak.peak_bytes == plan.peak_bytes <= limit_bytes
    assert estimate.time_s == pytest.approx(plan.step_time_s)
