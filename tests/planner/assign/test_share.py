"""Blocks that share a unit: where the tree allows it, where it is faster, and only while it fits."""

import dataclasses
import math

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, RESIDENT, ZDP
from lightning_osdp.core.cluster import Cluster, Link, UnitOverhead
from lightning_osdp.core.profile import ModelProfile, OperatorProfile, Segment
from lightning_osdp.core.units import merged, partition
from lightning_osdp.planner.assign import Setting, share_units
from lightning_osdp.planner.assign.merging import share
from lightning_osdp.planner.cost import Workload
from lightning_osdp.planner.engine import FSDP2

LINK = Link(latency_s=1e-3, seconds_per_byte=1e-9)
FREE = Link(latency_s=0.0, seconds_per_byte=1e-9)


def operator(name, num_bytes=4000, **changes):
    parts = name.split(".")
    above = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    called = [module for module in above if not module.endswith("blocks")]
    return OperatorProfile(
        name=name,
        kind="Linear",
        **{
            "enclosing": (*called, ""),
            "parameter_bytes": num_bytes,
            "num_trainable": num_bytes // 4,
            "gathered_bytes": num_bytes,
            "trainable_bytes": num_bytes,
            "gradient_bytes": num_bytes,
            "optimizer_bytes": 2 * num_bytes,
            **changes,
        },
    )


def setting(operators, *, link=LINK, overhead=None, min_unit_bytes=0):
    profile = ModelProfile.in_turn(operators)
    return Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=min_unit_bytes),
        cluster=Cluster(world_size=2, all_gather=link, reduce_scatter=link, unit_overhead=overhead or {}),
        workload=Workload(micro_batch_size=1),
    )


def blocks(count=4):
    inner = [operator(f"blocks.{i}.{part}") for i in range(count) for part in ("attention.qkv", "attention.out", "fc")]
    return [operator("tokens", 8000), *inner, operator("head", 8000)]


def names(shared):
    return [unit.name for unit in shared.units]


def modes_of(given, mode):
    return tuple(DP if unit.is_root else mode for unit in given.units)


@pytest.mark.parametrize("mode", [ZDP, DP])
def test_equal_modes_in_a_block_share_its_unit_and_stacks_stay_apart(mode):
    given = setting(blocks())
    shared, modes = share_units(given, modes_of(given, mode), memory_limit_bytes=math.inf)
    assert names(shared) == ["", "tokens", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert set(modes[1:]) == {mode}
    assert shared.costs.step_time_s(modes) < given.costs.step_time_s(modes_of(given, mode))


@pytest.fixture
def tried(monkeypatch):
    """Returns a list to which each attempt with other units is added."""
    found, make = [], share.in_other_units

    def record(setting, modes, what, *rest):
        found.append(what)
        return make(setting, modes, what, *rest)

    monkeypatch.setattr(share, "in_other_units", record)
    return found


def test_blocks_that_all_differ_are_tried_by_parts_of_the_model_where_there_are_many(tried, monkeypatch):
    inner = [operator(f"blocks.{i}.{part}", 4000 + 100 * i) for i in range(16) for part in ("qkv", "out", "fc")]
    given = setting([operator("tokens", 8000), *inner, operator("head", 8000)])
    modes = modes_of(given, ZDP)
    apart = share_units(given, modes, memory_limit_bytes=math.inf)[0]
    assert len(tried) == 16
    tried.clear()
    monkeypatch.setattr(share, "MAX_TRIED_UNITS", 4 * len(given.units))
    together = share_units(given, modes, memory_limit_bytes=math.inf)[0]
    assert len(tried) == 4
    assert names(together) == names(apart) == ["", "tokens", *(f"blocks.{i}" for i in range(16)), "head"]


def test_every_operator_stays_in_exactly_one_unit():
    given = setting(blocks())
    shared, _ = share_units(given, given.costs.additive.fastest_modes, memory_limit_bytes=math.inf)
    found = [operator.name for unit in shared.units for operator in unit.operators]
    assert sorted(found) == sorted(operator.name for operator in given.profile)


def test_a_block_of_two_modes_shares_only_where_they_agree():
    given = setting(blocks(2))
    modes = [mode.name for mode in modes_of(given, ZDP)]
    chosen = tuple(
        DP if unit.is_root or unit.name == "blocks.1.fc" else ZDP for unit, _ in zip(given.units, modes, strict=True)
    )
    shared, found = share_units(given, chosen, memory_limit_bytes=math.inf)
    assert names(shared) == ["", "tokens", "blocks.0", "blocks.1.attention", "blocks.1.fc", "head"]
    assert dict(zip(names(shared), found, strict=True))["blocks.1.fc"] is DP


def test_nothing_is_shared_that_saves_no_time():
    given = setting(blocks(), link=FREE)
    fastest = given.costs.additive.fastest_modes
    assert share_units(given, fastest, memory_limit_bytes=math.inf) == (given, fastest)
    overhead = {"flatten": UnitOverhead(fixed_s=1e-3)}
    costly = setting(blocks(), link=FREE, overhead=overhead)
    assert len(share_units(costly, costly.costs.additive.fastest_modes, memory_limit_bytes=math.inf)[0].units) == 7


def test_only_the_last_blocks_share_where_memory_is_short():
    given = setting(blocks())
    modes = modes_of(given, ZDP)
    alone = given.costs.peak(modes).peak_bytes
    whole, whole_modes = share_units(given, modes, memory_limit_bytes=math.inf)
    most = whole.costs.peak(whole_modes).peak_bytes
    assert most > alone
    found = set()
    for limit in range(alone, most + 1, 500):
        shared, shared_modes = share_units(given, modes, memory_limit_bytes=limit)
        assert shared.costs.peak(shared_modes).peak_bytes <= limit
        found.add(tuple(names(shared)))
    assert len(found) > 1


def test_small_operators_join_the_shared_unit_of_their_block():
    parts = [operator(f"blocks.{i}.norm", 16) for i in range(4)]
    given = setting([*blocks(), *parts], min_unit_bytes=100)
    assert {operator.name for operator in given.units[0].operators} == {f"blocks.{i}.norm" for i in range(4)}
    shared, _ = share_units(given, given.costs.additive.fastest_modes, memory_limit_bytes=math.inf)
    assert shared.units[0].operators == ()


def test_a_module_cannot_share_parameters_that_are_used_outside_it():
    operators = blocks(2)
    operators[1] = dataclasses.replace(operators[1], enclosing=("blocks.0.attention.qkv", ""))
    given = setting(operators)
    assert merged(given.profile, given.units, ["blocks.0.attention"]) is None
    shared, _ = share_units(given, given.costs.additive.fastest_modes, memory_limit_bytes=math.inf)
    assert names(shared) == [
        "",
        "tokens",
        "blocks.0.attention.qkv",
        "blocks.0.attention.out",
        "blocks.0.fc",
        "blocks.1",
        "head",
    ]


def test_no_unit_holds_more_than_half_of_the_model():
    given = setting([operator("body.a"), operator("body.b"), operator("head")])
    shared, _ = share_units(given, given.costs.additive.fastest_modes, memory_limit_bytes=math.inf)
    assert names(shared) == ["", "body.a", "body.b", "head"]


def test_where_communication_overlaps_sharing_is_judged_by_the_simulated_step():
    given = setting(blocks())
    busy = {o.name: Segment(operator=o.name, forward_s=Affine(0.1), backward_s=Affine(0.1)) for o in given.profile}
    profile = ModelProfile.in_turn(given.profile.operators, busy)
    blocking = dataclasses.replace(given, profile=profile, units=partition(profile, min_unit_bytes=0))
    ranks, ahead = dataclasses.replace(blocking.cluster, overlaps=True), FSDP2(forward_prefetch=True)
    overlapping = dataclasses.replace(blocking, cluster=ranks, engine=ahead)
    modes = given.all_zdp_modes
    # all latency but that of the ends is hidden behind computing: nothing to save by sharing, and units to lose
    assert share_units(overlapping, modes, memory_limit_bytes=math.inf)[0] is overlapping
    assert len(share_units(blocking, modes, memory_limit_bytes=math.inf)[0].units) < len(given.units)
    overhead = {"flatten": UnitOverhead(fixed_s=1e-3)}
    costly = dataclasses.replace(overlapping, cluster=dataclasses.replace(overlapping.cluster, unit_overhead=overhead))
    shared, shared_modes = share_units(costly, modes, memory_limit_bytes=math.inf)
    assert shared.costs.step_time_s(shared_modes) < costly.costs.step_time_s(modes)


def test_nothing_is_resident_in_one_unit_with_what_is_trained():
    frozen = dict.fromkeys(("num_trainable", "trainable_bytes", "gradient_bytes", "optimizer_bytes"), 0)
    sizes = {"fc": (4000, frozen), "out": (4000, frozen), "adapter": (40, {})}
    inner = [operator(f"m.blocks.{i}.{name}", size, **made) for i in range(2) for name, (size, made) in sizes.items()]
    given = setting([*inner, operator("head", 8000)], min_unit_bytes=100)
    assert names(given)[:2] == ["", "m"]  # with the adapters
    modes = [RESIDENT if "blocks" in unit.name else ZDP for unit in given.units]
    shared, found = share_units(given, (DP, *modes[1:]), memory_limit_bytes=math.inf)
    assert not any(mode is RESIDENT and unit.gradient_bytes for unit, mode in zip(shared.units, found, strict=True))
    assert shared.costs.step_time_s(found) <= given.costs.step_time_s((DP, *modes[1:]))
