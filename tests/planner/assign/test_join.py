"""Units of several modules: which may be one, where that is faster, and only while it fits."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, RESIDENT, ZDP
from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import Rerun
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting, join_units, trained_together
from lightning_osdp.planner.assign.merging import share
from lightning_osdp.planner.cost import Workload
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.scheduler import make_plan
from lightning_osdp.planner.simulation import simulate
from tests.support.overlapped import made, overlapped
from tests.support.tiers import examples


@pytest.fixture
def given_setting(model, operator):
    """Units of these names and sizes on two ranks, where a collective takes a second whatever its size."""

    def build(*sizes, names=None, latency_s=1.0, changes=None, **fields):
        names = names or [f"m{index}" for index in range(len(sizes))]
        operators = (
            operator(name, size, **(changes or {}).get(name, {})) for name, size in zip(names, sizes, strict=True)
        )
        profile = dataclasses.replace(model(*operators), **fields)
        link = Link(latency_s=latency_s, seconds_per_byte=0.0)
        return Setting(
            profile=profile,
            units=partition(profile, min_unit_bytes=0),
            cluster=Cluster(world_size=2, all_gather=link, reduce_scatter=link),
            workload=Workload(micro_batch_size=1),
        )

    return build


def joined_in(setting, mode=ZDP, limit_bytes=math.inf):
    modes = tuple(DP if unit.is_root else mode for unit in setting.units)
    found, modes = join_units(setting, modes, memory_limit_bytes=limit_bytes)
    return {unit.name: unit.modules for unit in found.units if unit.modules}, found, modes


def test_one_collective_takes_the_place_of_two(given_setting):
    setting = given_setting(100, 100, 100, 100)
    lists, found, modes = joined_in(setting)
    assert lists == {"m0": ("m0", "m1"), "m2": ("m2", "m3")}  # no unit is more than half of the model
    assert [[operator.name for operator in unit.operators] for unit in found.units] == [[], ["m0", "m1"], ["m2", "m3"]]
    assert (setting.costs.step_time_s(setting.all_zdp_modes), found.costs.step_time_s(modes)) == (12.0, 6.0)
    assert [unit.calls for unit in found.units[1:]] == [((0, 1),), ((2, 3),)]


def test_equal_units_are_joined_alike_and_then_pairs_of_pairs(given_setting):
    lists, _, _ = joined_in(given_setting(*[100] * 12))
    assert lists == {f"m{i}": tuple(f"m{j}" for j in range(i, i + 4)) for i in (0, 4, 8)}


def test_units_that_all_differ_are_joined_by_parts_of_the_model_where_there_are_many(given_setting, monkeypatch):
    setting = given_setting(*range(100, 116))
    monkeypatch.setattr(share, "MAX_TRIED_UNITS", 2 * len(setting.units))
    lists, _, _ = joined_in(setting)
    assert sorted(name for names in lists.values() for name in names) == sorted(f"m{i}" for i in range(16))
    assert all(len(names) > 1 for names in lists.values())


def test_nothing_is_joined_that_saves_no_time(given_setting):
    assert joined_in(given_setting(100, 100, 100, 100, latency_s=0.0))[0] == {}


def test_as_many_of_the_last_ones_are_joined_as_fit(given_setting):
    setting = given_setting(*[100] * 10)
    least = setting.costs.exact_peak(setting.all_zdp_modes).peak_bytes
    found = set()
    for limit_bytes in range(least, least + 800, 25):
        lists, joined, modes = joined_in(setting, limit_bytes=limit_bytes)
        assert joined.costs.exact_peak(modes).peak_bytes <= limit_bytes
        found.add(len(lists))
    assert len(found) > 2


def test_units_of_different_modes_are_not_joined(given_setting):
    setting = given_setting(100, 100, 100, 100)
    found, _ = join_units(setting, (DP, DP, ZDP, DP, ZDP), memory_limit_bytes=math.inf)
    assert found is setting


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"m1": {"dtype": "float16"}, "m3": {"dtype": "float16"}}, {}),
        ({"m1": {"stands_alone": True}, "m3": {"stands_alone": True}}, {}),
        ({"m1": {"num_calls": 2}, "m3": {"num_calls": 2}}, {}),
        ({}, {"rerun": {f"m{i}": Rerun((i, i), is_early=False, modules=()) for i in range(4)}}),
    ],
    ids=["dtypes", "alone", "called again", "recomputing"],
)
def test_units_that_cannot_be_one_are_not_joined(given_setting, changes, fields):
    assert joined_in(given_setting(100, 100, 100, 100, changes=changes, **fields))[0] == {}


def again(span, *modules):
    return Rerun(span, is_early=False, modules=modules)


def test_units_are_joined_inside_a_block_that_recomputes_and_not_across_it(given_setting):
    names = ["a.x", "a.y", "b.x", "b.y"]
    rerun = {"a": again((0, 1), "a.x", "a.y"), "b": again((2, 3), "b.x", "b.y")}
    lists, _, _ = joined_in(given_setting(100, 100, 100, 100, names=names, rerun=rerun))
    assert lists == {"a.x": ("a.x", "a.y"), "b.x": ("b.x", "b.y")}
    rerun = {"a": again((1, 1), "a.x"), "b": again((2, 2), "b.x")}
    lists, _, _ = joined_in(given_setting(100, 100, 100, 100, names=["x", "a.x", "b.x", "y"], rerun=rerun))
    assert lists == {}


def test_units_are_not_joined_across_children_that_run_backward_one_by_one(given_setting):
    names = ["a.x", "b.x", "b.y", "c.x"]
    sizes = [100] * 4
    assert joined_in(given_setting(*sizes, names=names))[0] == {"a.x": ("a.x", "b.x"), "b.y": ("b.y", "c.x")}
    lists, _, _ = joined_in(given_setting(*sizes, names=names, children_apart=True))
    assert lists == {"b.x": ("b.x", "b.y")}


ADAPTED = [f"{layer}.{part}" for layer in "abcd" for part in ("base", "down", "up")]
FROZEN = {name: {"frozen": True} for name in ADAPTED if name.endswith("base")}


def test_trained_units_are_joined_over_frozen_ones_between_them(given_setting):
    names, changes = ADAPTED, FROZEN
    setting = given_setting(*[900, 10, 10] * 4, names=names, changes=changes)
    modes = [RESIDENT if unit.name in changes else DP if unit.is_root else ZDP for unit in setting.units]
    found, joined_modes = join_units(setting, tuple(modes), memory_limit_bytes=math.inf)
    lists = {unit.name: unit.modules for unit in found.units if unit.modules}
    assert lists == {"a.down": tuple(name for name in names if name not in changes)}
    assert [unit.calls for unit in found.units if unit.modules] == [((1, 11),)]
    # eight units are gathered twice and reduced; one is
    assert setting.costs.step_time_s(modes) - found.costs.step_time_s(joined_modes) == 3 * 7


def test_all_that_is_trained_is_one_unit_where_it_may_be(given_setting):
    setting = given_setting(*[900, 10, 10] * 4, names=ADAPTED, changes=FROZEN)
    (found,) = trained_together(setting)
    lists = {unit.name: unit.modules for unit in found.units if unit.modules}
    assert lists == {"a.down": tuple(name for name in ADAPTED if name not in FROZEN)}
    assert {unit.name for unit in found.units} == {"", "a.down", *FROZEN}
    plan = make_plan(
        setting.profile,
        setting.cluster,
        memory_limit_bytes=2**40,
        micro_batch_size=1,
        search_space=SearchSpace(slices=(1,)),
    )
    # a second for each all-gather and each reduce-scatter of what is trained
    assert (plan.step_time_s, {unit.name: unit.modes[0] for unit in plan.units if unit.modules}) == (
        2.0,
        {"a.down": "DP"},
    )
    assert trained_together(given_setting(*[100] * 4)) == []
    mostly_trained = given_setting(*[10, 300, 300] * 4, names=ADAPTED, changes=FROZEN)
    assert trained_together(mostly_trained) == []


def test_a_unit_around_others_is_not_joined(given_setting):
    found, _, _ = joined_in(given_setting(100, 100, 100, 100, names=["a", "b", "b.x", "c"]))
    assert all("b" not in modules for modules in found.values())


def test_a_unit_inside_another_is_not_joined_with_one_outside(given_setting):
    """Checks that units stay apart where a unit around one of them would be sharded before, or after, both."""
    found, _, _ = joined_in(given_setting(300, 100, 100, names=["body", "body.x", "last"]))
    assert found == {}
    found, _, _ = joined_in(given_setting(300, 100, 100, names=["body", "body.x", "body.y"]))
    assert found == {"body.x": ("body.x", "body.y")}


@examples(60)
@given(case=overlapped(most=6), overlaps=st.booleans(), mode=st.sampled_from([ZDP, DP]))
def test_joined_units_are_faster_and_fit(model, operator, case, overlaps, mode):
    found = dataclasses.replace(made(model, operator, case), engine=FSDP2(forward_prefetch=True))
    found = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, overlaps=overlaps))
    modes = tuple(DP if unit.is_root else mode for unit in found.units)
    limit_bytes = found.costs.exact_peak(modes).peak_bytes + 150
    joined, joined_modes = join_units(found, modes, memory_limit_bytes=limit_bytes)
    assert joined.costs.exact_peak(joined_modes).peak_bytes <= limit_bytes
    if joined is not found:
        assert joined.costs.step_time_s(joined_modes) < found.costs.step_time_s(modes)
    held = sorted(operator.name for unit in joined.units for operator in unit.operators)
    assert held == sorted(operator.name for operator in found.profile)


def test_a_plan_with_units_of_several_modules_is_what_the_simulator_goes_through(given_setting):
    setting = given_setting(*[100] * 8)
    slow = {
        operator.name: dataclasses.replace(segment, forward_s=Affine(0.5), backward_s=Affine(1.0))
        for operator, segment in zip(setting.profile, setting.profile.segments, strict=False)
    }
    profile = dataclasses.replace(setting.profile, segments=(*slow.values(), setting.profile.segments[-1]))
    for overlaps in (False, True):
        ranks = dataclasses.replace(setting.cluster, overlaps=overlaps)
        plan = make_plan(
            profile,
            ranks,
            memory_limit_bytes=3000,
            micro_batch_size=1,
            engine=FSDP2(),
            search_space=SearchSpace(min_unit_bytes=0),
        )
        assert any(unit.modules for unit in plan.units)
        assert Plan.from_json(plan.to_json()) == plan
        step = simulate(plan, profile, ranks)
        assert step.time_s == pytest.approx(plan.step_time_s)
        assert step.peak.peak_bytes == plan.peak_bytes
