import dataclasses
from itertools import product

import pytest

from lightning_osdp.core.axes import LEVELS, Treatment
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.scheduler import PlanMethod, make_plan
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.report.alternatives import find_alternatives
from lightning_osdp.report.cases import memory_price

GIB = 2**30


def brute_force(plan, profile, ranks, unit, block):
    """Mode, sync and activations -> seconds and bytes, each of a plan that is written by hand."""
    syncs = ("every", "last") if plan.num_micro_batches > 1 else ("every",)
    found = {}
    for mode, sync, choice in product(
        ("ZDP", "DP", "replicated"), syncs, ("keep", "recompute") if block else ("keep",)
    ):
        units = [each.in_modes(mode, sync=sync) if each is unit else each for each in plan.units]
        blocks = [each for each in plan.blocks if each.name != block]
        blocks += [Block(name=block, treatment=Treatment(saves=choice))] if choice != "keep" else []
        estimate = simulate(dataclasses.replace(plan, units=tuple(units), blocks=tuple(blocks)), profile, ranks)
        found[mode, sync, choice] = estimate.time_s, estimate.peak.peak_bytes
    return found


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(("name", "block"), [("h.0.attn", "h.0"), ("h.3.mlp", "h.3"), ("head", "")])
def test_alternatives_are_those_of_plans_written_by_hand(planned, profile, ranks, name, block, number):
    plan = planned(number=number, share_units=False, slices=(1,))
    (unit,) = (each for each in plan.units if name in each.operators)
    ways = find_alternatives(plan, profile, ranks, name)
    found = {
        (*each.modes, each.sync, each.activations): (each.step_time_s, each.peak_bytes)
        for each in (ways.planned, *ways.others)
    }
    assert found == brute_force(plan, profile, ranks, unit, block)
    assert ways.block == block
    assert len(set(found.values())) > 1
    assert ways.planned.step_time_s == pytest.approx(plan.step_time_s)
    assert ways.planned.peak_bytes <= plan.peak_bytes
    assert [each.step_time_s for each in ways.others] == sorted(each.step_time_s for each in ways.others)


def test_of_a_split_operator_every_number_of_slices_is_an_alternative(model, linear, cluster):
    profile = model(linear("a", 64, 64), linear("b", 64, 64, position=1))
    whole = SearchSpace(share_units=False)
    plan = make_plan(profile, cluster(2), memory_limit_bytes=10**6, micro_batch_size=1, search_space=whole)
    root, _, b = plan.units
    split = dataclasses.replace(
        plan, units=(root, dataclasses.replace(b.in_modes("ZDP", "DP", "ZDP", "ZDP"), name="a", operators=("a",)), b)
    )
    ways = find_alternatives(split, profile, cluster(2), "a")
    assert {each.modes for each in ways.others} == {
        ("ZDP", "ZDP", "ZDP", "ZDP"),
        ("DP", "DP", "ZDP", "ZDP"),
        ("DP", "DP", "DP", "ZDP"),
        ("DP", "DP", "DP", "DP"),
        ("replicated", "replicated", "replicated", "replicated"),
    }
    assert all(each.step_time_s < ways.planned.step_time_s for each in ways.others if each.modes.count("DP") > 1)


def test_the_reason_is_what_is_faster_and_whether_it_fits(planned, profile, ranks):
    everything = planned(1000, share_units=False)
    assert "No other way is faster" in find_alternatives(everything, profile, ranks, "h.0.attn").why()
    units = [unit.in_modes("ZDP") if unit.name == "wte" else unit for unit in everything.units]
    freed = dataclasses.replace(everything, units=tuple(units))
    peak_bytes = simulate(freed, profile, ranks).peak.peak_bytes
    ways = find_alternatives(dataclasses.replace(freed, memory_limit_bytes=peak_bytes), profile, ranks, "wte")
    kept, whole = sorted(ways.others, key=lambda each: each.peak_bytes)
    assert (kept.modes, whole.modes) == (("DP",), ("replicated",))
    assert kept.step_time_s < ways.planned.step_time_s
    saved = format_seconds(ways.planned.step_time_s - kept.step_time_s)
    short = format_bytes(kept.peak_bytes - peak_bytes)
    assert ways.why() == f"DP would save {saved} a step, but takes {short} more than the limit."
    assert find_alternatives(freed, profile, ranks, "wte").why().endswith("plan anew.")
    only = dataclasses.replace(freed, search_space=SearchSpace(modes=("ZDP",)))
    assert (
        find_alternatives(only, profile, ranks, "wte")
        .why()
        .endswith("and fit, but is not in the search space of the plan.")
    )


def test_offloading_is_an_alternative_where_the_plan_offloads(planned, profile, ranks):
    plan = planned(1000)
    offloading = dataclasses.replace(plan, blocks=(Block(name="h.1", treatment=Treatment(saves="offload")),))
    activations = [
        {each.activations for each in find_alternatives(each, profile, ranks, "h.0.mlp").others}
        for each in (plan, offloading)
    ]
    assert activations == [{"keep", "recompute"}, {"keep", "recompute", "offload"}]


def test_levels_are_alternatives_and_say_what_they_keep(planned, at_levels, ranks):
    plan = planned(1000)
    level = Block(name="h.1", treatment=Treatment(saves=LEVELS[0]), kept=(0,))
    ways = find_alternatives(dataclasses.replace(plan, blocks=(level,)), at_levels, ranks, "h.1.mlp")
    assert ways.planned.name.endswith(", selective_1 (keeps results 0)")
    assert {each.activations for each in ways.others} == {"keep", "recompute", LEVELS[0]}


def test_of_the_root_and_of_one_rank_there_is_nothing_to_choose(planned, profile, ranks):
    plan = planned()
    assert "never freed" in find_alternatives(plan, profile, ranks, "").why()
    alone = dataclasses.replace(ranks, world_size=1)
    plan = make_plan(profile, alone, memory_limit_bytes=GIB, micro_batch_size=1)
    assert "one rank" in find_alternatives(plan, profile, alone, "wte").why()


@pytest.mark.slow
def test_the_price_of_memory_is_of_two_plans(planned, profile, ranks):
    plan = planned(number=2)
    price = memory_price(plan, profile, ranks, more_bytes=2**22)
    times = [
        make_plan(profile, ranks, memory_limit_bytes=limit, micro_batch_size=BatchPolicy.fixed(2, 2)).step_time_s
        for limit in (plan.memory_limit_bytes, plan.memory_limit_bytes + 2**22)
    ]
    assert [price.step_time_s, price.with_more_s] == times
    assert price.saves == 1 - times[1] / times[0] > 0
    assert memory_price(plan, profile, ranks).more_bytes == 8 * 2**20  # an eighth of 80 MiB is 10 MiB
    assert memory_price(planned(200), profile, ranks).more_bytes == 16 * 2**20


def test_the_price_of_memory_is_of_what_the_plan_was_chosen_from(planned, profile, ranks):
    sharded = planned(modes=("ZDP",), slices=(1,), activations=("keep",), share_units=False)
    assert memory_price(sharded, profile, ranks).saves == 0
    assert memory_price(dataclasses.replace(sharded, search_space=SearchSpace()), profile, ranks).saves > 0


def test_the_price_of_memory_leaves_blocks_as_they_were_given(profile, ranks):
    blocks = {block.name: "recompute" for block in profile.blocks}
    asked = {"micro_batch_size": 2, "method": PlanMethod(blocks=blocks, search="greedy")}
    plan = make_plan(profile, ranks, memory_limit_bytes=GIB, **asked)
    assert plan.given_blocks
    price = memory_price(plan, profile, ranks, more_bytes=GIB)
    more = make_plan(profile, ranks, memory_limit_bytes=2 * GIB, **asked)
    assert (price.step_time_s, price.with_more_s) == (plan.step_time_s, more.step_time_s)


def test_the_command_prints_both_within_80_columns(folder, run, answer, planned, profile, ranks):
    code, out, err = run("explain", "h.2.mlp", "--more", "4MiB")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("h.2.mlp: unit ")
    document = answer("explain", "h.2.mlp", "--more", "4MiB")
    ways = find_alternatives(planned(), profile, ranks, "h.2.mlp")
    assert [each["step_time_s"] for each in document["others"]] == [each.step_time_s for each in ways.others]
    assert document["price"]["saves"] == memory_price(planned(), profile, ranks, more_bytes=2**22).saves
    assert document["why"] in " ".join(out.split())
    assert f"4.00 MiB more memory saves {document['price']['saves']:.1%}" in " ".join(out.split())


def test_a_module_stands_for_the_unit_that_has_all_its_operators(planned, profile, ranks):
    plan = planned(1000, share_units=False)
    names = ["h.0.attn", "h.0.mlp"]
    joined = dataclasses.replace(plan.units[2], name="h.0.attn", operators=tuple(names), modules=tuple(names))
    units = (*plan.units[:2], joined, *plan.units[4:])
    ways = find_alternatives(dataclasses.replace(plan, units=units), profile, ranks, "h.0")
    assert (ways.unit, ways.unit_operators, ways.block) == ("h.0.attn", ("h.0.attn", "h.0.mlp"), "h.0")
    with pytest.raises(ConfigurationError, match=r"got 'h\.0'\. The nearest are h\."):
        find_alternatives(plan, profile, ranks, "h.0")


def test_without_a_price_nothing_is_planned(folder, answer, monkeypatch):
    monkeypatch.setattr("lightning_osdp.report.cases.make_plan", None)
    assert answer("explain", "wte", "--price", "false")["price"] is None


def test_an_operator_that_is_not_there_is_told_with_the_nearest(folder, run, planned, profile, ranks):
    code, out, err = run("explain", "h.2.mpl")
    assert (code, out) == (2, "")
    assert err.startswith("lightning-osdp: Expected an operator of the plan, got 'h.2.mpl'. The nearest are h.2.mlp")
    with pytest.raises(ConfigurationError, match="`lightning-osdp show` lists them"):
        find_alternatives(planned(), profile, ranks, "@@@")
