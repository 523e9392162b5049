"""Plans with less memory than one that did not fit."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.axes import Treatment, named
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.step import Workload
from lightning_osdp.planner.scheduler import freeable_bytes, in_micro_batches, make_plan, with_less_memory
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.report.sentences import summarise
from tests.support.plans import menu, priced
from tests.support.tiers import examples


def unit(name, *modes, sync="every", **costs):
    return Unit(name=name, operators=(name,), kind="Linear", treatments=named(*modes, sync=sync), time_s=1.0, **costs)


PLAN = Plan(
    fingerprint={},
    world_size=2,
    units=(
        unit("", "DP", menu=menu(9.0, 0)),
        unit("dear", "DP", menu=menu(0.4, 100)),
        unit("cheap", "DP", menu=menu(0.1, 100)),
        unit("sharded", "ZDP", menu=menu(0.1, 100)),
        unit("halved", "DP", "ZDP", menu=menu(0.5, 200)),
        unit("late", "ZDP", sync="last", menu=menu(0.0, 0, 0.1, 50)),
    ),
    memory_limit_bytes=2000,
    peak_bytes=1000,
    micro_batch_size=8,
    num_micro_batches=2,
    step_time_s=10.0,
    samples_per_s=3.2,
    gap=0.1,
    all_zdp_peak_bytes=700,
    peak_phase="forward",
    peak_parts={"gathered parameters": 300},
    evaluation_peak_bytes=500,
)


def kept(plan):
    return {unit.name: (*unit.modes, unit.sync) for unit in plan.units}


def test_what_is_kept_counts_as_freeable():
    assert freeable_bytes(PLAN) == 100 + 100 + 100 + 50


def test_a_unit_that_holds_parameters_and_gradients_between_micro_batches_frees_them_one_after_the_other():
    both = unit("both", "DP", sync="last", menu=menu(0.0, 100, 0.0, 50))
    plan = dataclasses.replace(PLAN, units=(PLAN.units[0], both))
    assert freeable_bytes(plan) == 150
    lower = with_less_memory(plan, 150)
    assert kept(lower)["both"] == ("ZDP", "every")
    assert lower.peak_bytes == 850


@pytest.mark.parametrize(
    ("reduce_s", "first"), [(0.1, ("DP", "every")), (1.0, ("ZDP", "last"))], ids=["gradients", "parameters"]
)
def test_whatever_such_a_unit_frees_first_nothing_is_counted_twice(reduce_s, first):
    # two micro-batches: a gather of a second in place of four, a reduction in place of two
    (freed, kept_), waits = named("ZDP", "DP"), {"sync": "last"}
    options = {
        freed: (0.0, 0),
        freed.but(**waits): (reduce_s, 50),
        kept_: (2.0, 100),
        kept_.but(**waits): (3 + reduce_s, 150),
    }
    both = unit("both", "DP", sync="last", menu=priced(options))
    plan = dataclasses.replace(PLAN, units=(PLAN.units[0], both))
    assert kept(with_less_memory(plan, 1))["both"] == first
    lower = with_less_memory(plan, 150)
    assert kept(lower)["both"] == ("ZDP", "every")
    assert lower.peak_bytes == 850
    assert lower.step_time_s == pytest.approx(10 + 3.0 + reduce_s)


@examples(20)
@given(
    sizes=st.lists(st.sampled_from([40, 100, 300]), min_size=1, max_size=4),
    number=st.integers(1, 4),
    share=st.floats(0.0, 1.0),
    latency_s=st.sampled_from([0.0, 0.5]),
)
def test_seconds_are_those_of_the_simulated_plan_where_nothing_overlaps(
    model, operator, cluster, sizes, number, share, latency_s
):
    profile = model(*(operator(f"m{index}", size) for index, size in enumerate(sizes)))
    ring = cluster(2, latency_s=latency_s, seconds_per_byte=0.01)
    plan = make_plan(
        profile,
        ring,
        memory_limit_bytes=10**6,
        micro_batch_size=BatchPolicy.fixed(1, number),
        search_space=SearchSpace(min_unit_bytes=0, share_units=False),
    )
    lower = with_less_memory(plan, round(share * freeable_bytes(plan)))
    assert simulate(lower, profile, ring).time_s == pytest.approx(lower.step_time_s)


def test_shards_that_forward_leaves_in_nodes_are_freed_too():
    left = unit("left", "hpZ", menu=menu(0.4, 400, node_bytes=100, node_s=0.4))
    plan = dataclasses.replace(PLAN, world_size=8, node_size=4, units=(PLAN.units[0], left))
    assert freeable_bytes(plan) == 400 / 4
    lower = with_less_memory(plan, 50)
    assert kept(lower)["left"] == ("ZDP", "every")
    assert lower.peak_bytes == 900
    assert lower.step_time_s == pytest.approx(10.4)
    assert freeable_bytes(lower) == 0


def test_where_blocks_recompute_less_than_plain_fsdp_may_be_enough():
    plan = dataclasses.replace(PLAN, all_zdp_peak_bytes=1500)
    assert with_less_memory(plan, 350).peak_bytes == 650


@pytest.mark.parametrize(
    ("wanted_bytes", "changed", "lost_s", "peak_bytes"),
    [
        (0, ["cheap"], 0.1, 900),
        (100, ["cheap"], 0.1, 900),
        (101, ["cheap", "late"], 0.2, 850),
        (151, ["cheap", "late", "halved"], 0.45, 750),
        (351, ["cheap", "late", "halved", "dear"], 0.85, 700),
    ],
)
def test_what_frees_most_for_a_second_goes_first(wanted_bytes, changed, lost_s, peak_bytes):
    lower = with_less_memory(PLAN, wanted_bytes)
    least = {"cheap": ("ZDP", "every"), "late": ("ZDP", "every"), "halved": ("ZDP", "ZDP", "every")}
    least["dear"] = ("ZDP", "every")
    assert kept(lower) == kept(PLAN) | {name: least[name] for name in changed}
    assert lower.step_time_s == pytest.approx(10 + lost_s)
    assert lower.samples_per_s == pytest.approx(32 / (10 + lost_s))
    assert 1 + lower.gap == pytest.approx(1.1 * (1 + lost_s / 10))
    assert lower.peak_bytes == peak_bytes
    assert (lower.peak_phase, lower.peak_parts, lower.evaluation_peak_bytes) == ("", {}, 0)
    assert sum(unit.time_s for unit in lower.units) == pytest.approx(6 + lost_s)
    assert Plan.from_json(lower.to_json()) == lower


def test_where_nothing_is_kept_there_is_no_other_plan():
    least = with_less_memory(PLAN, freeable_bytes(PLAN))
    assert freeable_bytes(least) == 0
    assert with_less_memory(least, 1) is None


def test_one_rank_has_nothing_to_shard():
    alone = dataclasses.replace(PLAN, world_size=1)
    assert freeable_bytes(alone) == 0
    assert with_less_memory(alone, 1) is None


def test_a_plan_without_predictions_gets_none():
    units = (unit("", "DP"), unit("a", "DP"), unit("b", "DP"))
    plan = dataclasses.replace(PLAN, units=units, peak_bytes=0, step_time_s=0.0, samples_per_s=0.0, gap=0.0)
    lower = with_less_memory(plan, 0)
    assert kept(lower) == {"": ("DP", "every"), "a": ("ZDP", "every"), "b": ("ZDP", "every")}
    assert (lower.peak_bytes, lower.step_time_s, lower.samples_per_s, lower.gap) == (0, 0.0, 0.0, 0.0)


def test_smaller_micro_batches_make_up_the_same_step():
    plan = dataclasses.replace(PLAN, loss_bytes=PLAN.peak_bytes // 2)
    smaller = in_micro_batches(plan, Workload(micro_batch_size=4, num_micro_batches=4))
    assert dict(summarise(smaller))["step time"] == "not predicted"
    assert (smaller.micro_batch_size, smaller.num_micro_batches) == (4, 4)
    assert smaller.units == PLAN.units
    assert (smaller.step_time_s, smaller.samples_per_s, smaller.peak_bytes) == (0.0, 0.0, 0)
    assert Plan.from_json(smaller.to_json()) == smaller


def block(name, frees_bytes, costs_s):
    return Block(name=name, treatment=Treatment(saves="recompute"), frees_bytes=frees_bytes, costs_s=costs_s)


WITH_BLOCKS = dataclasses.replace(
    PLAN,
    units=(*PLAN.units[:3], unit("b.0.up", "ZDP"), unit("b.1.up", "ZDP"), unit("b.2.up", "ZDP")),
    blocks=(block("b.1", 40, 0.1),),
    recomputable=(block("b.0", 80, 0.2), block("b.2", 300, 0.1)),
)


@pytest.mark.parametrize(
    ("wanted_bytes", "recompute", "keep", "peak_bytes", "lost_s"),
    [
        (1, ["b.1", "b.2"], ["dear", "cheap"], 700, 0.1),
        (400, ["b.1", "b.2"], ["dear"], 600, 0.2),
        (401, ["b.0", "b.1", "b.2"], ["dear"], 520, 0.4),
        (10**9, ["b.0", "b.1", "b.2"], [], 420, 0.8),
    ],
)
def test_blocks_recompute_where_that_costs_less_than_what_units_keep(wanted_bytes, recompute, keep, peak_bytes, lost_s):
    assert freeable_bytes(WITH_BLOCKS) == 100 + 100 + 80 + 300
    lower = with_less_memory(WITH_BLOCKS, wanted_bytes)
    assert [block.name for block in lower.blocks] == recompute
    assert {block.activations for block in lower.blocks} == {"recompute"}
    assert [unit.name for unit in lower.units if unit.name and "DP" in unit.modes] == keep
    assert lower.peak_bytes == peak_bytes  # less than plain FSDP, whose blocks keep
    assert lower.step_time_s == pytest.approx(10 + lost_s)
    left = {block.name for block in WITH_BLOCKS.recomputable} - set(recompute)
    assert {block.name for block in lower.recomputable} == left
    assert Plan.from_json(lower.to_json()) == lower


def test_one_rank_has_blocks_that_can_recompute():
    alone = dataclasses.replace(WITH_BLOCKS, world_size=1)
    assert freeable_bytes(alone) == 380
    assert [block.name for block in with_less_memory(alone, 1).blocks] == ["b.1", "b.2"]
