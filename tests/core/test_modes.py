"""Modes as values; what an engine does in each is in `engine`."""

import dataclasses

import pytest

from lightning_osdp.core.modes import DP, HDP, HPZ, HSDP, MODES, NAMED_MODES, ZDP, freed_and_kept


def test_modes_are_found_by_their_names_least_memory_first():
    named = [("ZDP", ZDP), ("hpZ", HPZ), ("DP", DP), ("HSDP", HSDP), ("HDP", HDP)]
    assert list(NAMED_MODES.items()) == named


def test_modes_without_nodes_are_there_on_any_cluster():
    assert list(MODES.items()) == [("ZDP", ZDP), ("DP", DP)]


def test_without_nodes_a_mode_is_what_it_is_over_all_ranks():
    last = {"sync": "last", "activations": "recompute"}
    for mode, plain in ((ZDP, ZDP), (HPZ, ZDP), (DP, DP), (HSDP, ZDP), (HDP, DP)):
        assert dataclasses.replace(mode, **last).over_all == dataclasses.replace(plain, **last)


def test_what_frees_and_what_keeps_a_unit_are_over_the_same_ranks():
    assert {mode.name: freed_and_kept(mode) for mode in NAMED_MODES.values()} == {
        "ZDP": (ZDP, DP),
        "hpZ": (ZDP, DP),
        "DP": (ZDP, DP),
        "HSDP": (HSDP, HDP),
        "HDP": (HSDP, HDP),
    }


def test_a_mode_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZDP.resident = True
