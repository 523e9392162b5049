"""Axes and treatments as values; what a treatment does in a step is in `engine.effects`."""

import pickle

import pytest

from lightning_osdp.core.axes import (
    ANYTHING,
    AXES,
    DP,
    HDP,
    HPZ,
    HSDP,
    MODES,
    NAMED_MODES,
    NODE_STATIONARY,
    ONE_NODE,
    REPLICATED,
    RESIDENT,
    STATIONARY,
    ZDP,
    Subject,
    Treatment,
    freed_and_kept,
    modes_of,
    named,
    on_device,
    treatments_of,
)


def test_treatments_are_found_by_their_names_least_memory_first():
    expected = [("ZDP", ZDP), ("hpZ", HPZ), ("DP", DP), ("resident", RESIDENT), ("HSDP", HSDP), ("HDP", HDP)]
    expected += [("replicated", REPLICATED), ("stationary", STATIONARY), ("node_stationary", NODE_STATIONARY)]
    assert list(NAMED_MODES.items()) == expected
    assert [mode.but(sync="last", saves="recompute").name for mode in NAMED_MODES.values()] == [*NAMED_MODES]
    assert named("DP", "HSDP", sync="last") == (DP.but(sync="last"), HSDP.but(sync="last"))


def test_those_without_nodes_are_there_on_any_cluster_for_any_unit():
    assert list(MODES.items()) == [("ZDP", ZDP), ("DP", DP)]


def test_without_nodes_a_treatment_is_what_it_is_over_all_ranks():
    for mode, plain in ((ZDP, ZDP), (HPZ, ZDP), (DP, DP), (HSDP, ZDP), (HDP, DP)):
        last = mode.but(sync="last", saves="recompute")
        assert last.within(ONE_NODE) == plain.but(sync="last", saves="recompute")
        assert mode.needs_nodes == (mode is not plain)
    assert HDP.but(sync="node").within(ONE_NODE) == DP


def test_values_apply_where_their_axes_say():
    assert Treatment(keep="node", home="node").within(ANYTHING) == HSDP
    assert DP.but(sync="node").within(ANYTHING) == DP
    assert HPZ.within(Subject(is_reached=False)) == ZDP
    assert HDP.but(sync="last").within(Subject(may_wait=False)) == HDP
    saving = Treatment(saves="offload")
    assert saving.within(Subject(profiled=["recompute"])) == ZDP
    assert saving.within(Subject(profiled=["recompute", "offload"])) == saving


def test_what_is_trained_in_nodes_or_reduces_its_gradients_later_does_not_stay_for_ever():
    frozen = Subject(is_trained=False)
    assert RESIDENT.within(frozen) == RESIDENT
    assert RESIDENT.within(Subject(may_stay=False)) == ZDP
    assert RESIDENT.but(home="node").within(frozen) == HSDP
    assert RESIDENT.but(sync="last").within(frozen) == RESIDENT


def test_a_shard_on_the_host_is_that_of_a_frozen_unit_that_is_gathered_from_all_ranks_again_and_again():
    there = Treatment(shard="host")
    for mode in (ZDP, HPZ, DP):
        assert mode.but(shard="host").within(ANYTHING) == mode.but(shard="host")
        assert mode.but(shard="host").within(Subject(may_leave=False)) == mode
        assert on_device(mode.but(shard="host", states="host")) == mode
    for mode in (HSDP, HDP, RESIDENT, STATIONARY):
        assert mode.but(shard="host").within(ANYTHING) == mode
    assert modes_of(["ZDP"], ["every"], shards=["device", "host"]) == (there, ZDP)
    assert modes_of(["ZDP", "resident", "HSDP"], ["every"], shards=["host"]) == (there, RESIDENT, HSDP)


def test_what_moves_activations_gathers_nothing_and_is_over_all_ranks_or_those_of_a_node():
    assert STATIONARY.within(ANYTHING) == STATIONARY
    assert STATIONARY.within(Subject(may_exchange=False)) == ZDP
    assert NODE_STATIONARY.within(ONE_NODE) == STATIONARY
    others = {"keep": ("node", "whole", "always"), "sync": ("last", "node")}
    for mode in (STATIONARY, NODE_STATIONARY):
        for axis, values in others.items():
            assert [mode.but(**{axis: value}).within(ANYTHING) for value in values] == [mode] * len(values)
    assert [mode for mode in treatments_of(ANYTHING) if "moves" in mode] == [STATIONARY, NODE_STATIONARY]
    assert modes_of(["stationary", "DP"]) == (DP, STATIONARY, DP.but(sync="last"))


def test_what_frees_and_what_keeps_a_unit_are_over_the_same_ranks():
    assert {mode.name: freed_and_kept(mode) for mode in NAMED_MODES.values()} == {
        "ZDP": (ZDP, DP),
        "hpZ": (ZDP, DP),
        "DP": (ZDP, DP),
        "resident": (ZDP, RESIDENT),
        "HSDP": (HSDP, HDP),
        "HDP": (HSDP, HDP),
        "replicated": (REPLICATED, REPLICATED),
        "stationary": (ZDP, DP),
        "node_stationary": (HSDP, HDP),
    }


def test_each_rank_has_all_of_units_alone_that_are_trained_and_gathered():
    assert REPLICATED.within(ANYTHING) == REPLICATED.but(keep="whole", states="host").within(ANYTHING) == REPLICATED
    assert REPLICATED.within(Subject(may_replicate=False)) == ZDP
    assert STATIONARY.but(home="one").within(ANYTHING) == STATIONARY
    assert REPLICATED.but(sync="last").within(ANYTHING) == REPLICATED.but(sync="last")
    assert not REPLICATED.needs_nodes


def test_only_treatments_that_there_are_are_offered():
    assert modes_of(["DP", "HSDP"], ["last", "node"]) == (
        DP.but(sync="last"),
        HSDP.but(sync="last"),
        HSDP.but(sync="node"),
    )


def test_defaults_are_left_out_and_equal_treatments_are_one():
    kept = Treatment(sync="last", keep="whole", home="all", saves="keep")
    assert (dict(kept), kept["home"], "home" in kept) == ({"keep": "whole", "sync": "last"}, "all", False)
    assert repr(kept) == "Treatment(keep='whole', sync='last')"
    assert (kept, hash(kept)) == (DP.but(sync="last"), hash(DP.but(sync="last")))
    assert kept != ZDP != {}
    assert kept.only("keep", "saves") == DP
    assert kept.of_all_slices == Treatment(sync="last")
    assert pickle.loads(pickle.dumps(kept)) == kept
    assert not ZDP


def test_what_there_is_not_is_refused():
    with pytest.raises(KeyError, match="compute"):
        Treatment(compute="later")
    with pytest.raises(KeyError, match=r"Expected 'keep' to be one of .*'nothing', 'node', 'whole'.*, got 'all'"):
        Treatment(keep="all")
    with pytest.raises(TypeError):
        ZDP["keep"] = "whole"


def test_every_axis_has_its_default_among_its_values():
    for name, axis in AXES.items():
        assert (axis.name, axis.default in axis.values) == (name, True)
        least = Subject(has_nodes=False, is_reached=False, may_wait=False, may_exchange=False, profiled=())
        assert axis.applies(axis.default, ZDP, least)
