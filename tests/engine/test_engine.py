"""What every engine does, against figure 1 of the paper, and engines as parts of plans."""

import dataclasses

import pytest

from lightning_osdp.core.modes import ALL_MODES, DP, ZDP
from lightning_osdp.core.units import partition
from lightning_osdp.engine import AUTO, ENGINES, FSDP1, engine_of
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.scheduler import make_plan


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
    assert [each.backward_prefetch for each in chosen.alternatives(overlaps=True)] == list(engine.prefetches)
    assert [each.backward_prefetch for each in chosen.alternatives(overlaps=False)] == ["none"]
    assert all(each.forward_prefetch for each in chosen.alternatives(overlaps=True))


def test_what_is_left_to_choose_does_not_run(engine, model):
    profile = model(100)
    units = partition(profile, min_unit_bytes=0)
    with pytest.raises(ValueError, match="runs nothing"):
        type(engine)(backward_prefetch=AUTO).events_of(profile, units, [DP, ZDP], 2)


def test_a_prefetch_that_the_engine_has_not_is_refused():
    with pytest.raises(ConfigurationError) as caught:
        FSDP1(backward_prefetch="both")
    assert str(caught.value) == "backward_prefetch must be one of ('pre', 'post', 'none', 'auto'), got 'both'."
