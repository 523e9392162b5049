import dataclasses

import pytest

from lightning_osdp.core.axes import LEVELS, Treatment
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.report.difference import compare_plans


@pytest.fixture
def plan(planned):
    return planned(1000, share_units=False, slices=(1,), activations=("keep",))


def changed(plan, name, **fields):
    units = tuple(unit.treated(**fields) if unit.name == name else unit for unit in plan.units)
    return dataclasses.replace(plan, units=units)


def test_of_equal_plans_nothing_differs(plan, folder, answer):
    found = compare_plans(plan, plan)
    assert (found.is_same_model, found.decisions, found.settings) == (True, (), {})
    assert all(before == after for before, after in found.numbers.values())


def test_operators_that_change_alike_are_told_together(plan):
    after = changed(changed(plan, "h.0.attn", keep="nothing"), "h.2.attn", keep="nothing")
    (decided,) = compare_plans(plan, after).decisions
    assert decided.operators == ("h.0.attn", "h.2.attn")
    assert (decided.before, decided.after) == ("DP", "ZDP")


def test_sync_activations_and_prefetch_are_compared(plan):
    after = changed(plan, "head", sync="last")
    after = dataclasses.replace(
        after,
        blocks=(Block(name="h.3", treatment=Treatment(saves="recompute")),),
        backward_prefetch="none",
        forward_prefetch=True,
    )
    before = dataclasses.replace(plan, backward_prefetch="pre", forward_prefetch=False)
    found = compare_plans(before, after)
    told = {decided.operators: (decided.before, decided.after) for decided in found.decisions}
    assert told == {("head",): ("DP", "DP, sync last"), ("h.3.attn", "h.3.mlp"): ("DP", "DP, recompute")}
    assert found.settings == {"backward_prefetch": ("pre", "none"), "forward_prefetch": (False, True)}


def test_levels_of_one_number_that_keep_other_results_are_told_apart(plan):
    levels = [
        dataclasses.replace(plan, blocks=(Block(name="h.3", treatment=Treatment(saves=LEVELS[0]), kept=kept),))
        for kept in ((0,), (0, 3))
    ]
    (decided,) = compare_plans(*levels).decisions
    assert decided.operators == ("h.3.attn", "h.3.mlp")
    told = tuple(f"DP, selective_1 (keeps results {results})" for results in ("0", "0, 3"))
    assert (decided.before, decided.after) == told


def test_units_that_hold_other_operators_are_told(plan):
    units = {unit.name: unit for unit in plan.units}
    joined = dataclasses.replace(units["h.0.attn"], name="h.0", operators=("h.0.attn", "h.0.mlp"))
    after = dataclasses.replace(plan, units=(units[""], units["wte"], joined, *plan.units[4:]))
    (decided,) = compare_plans(plan, after).decisions
    assert decided.operators == ("h.0.attn", "h.0.mlp")
    assert (decided.before, decided.after) == ("DP, alone", "DP, in a unit of 2")


def test_an_operator_of_one_plan_only_is_told(plan):
    found = compare_plans(plan, dataclasses.replace(plan, units=plan.units[:-1], fingerprint={}))
    assert not found.is_same_model
    assert [(each.operators, each.after) for each in found.decisions] == [(("head",), "not there")]


def test_numbers_are_compared(plan):
    found = compare_plans(plan, dataclasses.replace(plan, step_time_s=1.0, peak_bytes=0))
    assert found.numbers["step_time_s"] == (plan.step_time_s, 1.0)
    assert found.numbers["peak_bytes"] == (plan.peak_bytes, 0)
    assert found.numbers["samples_per_s"] == (plan.samples_per_s, plan.samples_per_s)


def test_the_command_prints_it_within_80_columns(plan, folder, run, answer):
    plan.save("other.json")
    code, out, err = run("diff", "osdp_plan.json", "other.json")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    labels = [line.split("  ")[0] for line in out.partition("\n\n")[0].splitlines()[2:]]
    assert labels[:6] == ["step time", "samples/s", "peak", "evaluation peak", "memory limit", "ranks"]
    assert "ZDP" in out
    document = answer("diff", "osdp_plan.json", "other.json")
    assert document["numbers"]["peak_bytes"][1] == plan.peak_bytes
    assert document["decisions"][0].keys() == {"operators", "before", "after"}
    dataclasses.replace(plan, step_time_s=2 * plan.step_time_s).save("slower.json")
    assert "+100.0%" in run("diff", "other.json", "slower.json")[1]
    assert "All operators are treated alike." in run("diff", "other.json", "other.json")[1]
