"""Modes as values; what an engine does in each is in `engine`."""

import dataclasses

import pytest

from lightning_osdp.core.modes import DP, HPZ, MODES, NAMED_MODES, ZDP


def test_modes_are_found_by_their_names_least_memory_first():
    assert list(NAMED_MODES.items()) == [("ZDP", ZDP), ("hpZ", HPZ), ("DP", DP)]


def test_modes_without_nodes_are_there_on_any_cluster():
    assert list(MODES.items()) == [("ZDP", ZDP), ("DP", DP)]


def test_a_mode_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZDP.resident = True
