"""Modes against figure 1 of the paper."""

import dataclasses

import pytest

from lightning_osdp.core.modes import ALL_MODES, DP, MODES, ZDP


def test_zdp_gathers_in_forward_and_again_in_backward():
    assert (ZDP.num_all_gathers(), ZDP.num_reduce_scatters(), ZDP.resident) == (2, 1, False)


def test_dp_gathers_once_and_stays_resident():
    assert (DP.num_all_gathers(), DP.num_reduce_scatters(), DP.resident) == (1, 1, True)


def test_a_unit_that_forward_calls_again_is_gathered_again_only_if_it_was_freed():
    assert [ZDP.num_all_gathers(num_calls) for num_calls in (1, 2, 3)] == [2, 3, 4]
    assert [DP.num_all_gathers(num_calls) for num_calls in (1, 2, 3)] == [1, 1, 1]


def test_modes_are_found_by_their_names_least_memory_first():
    assert list(MODES.items()) == [("ZDP", ZDP), ("DP", DP)]


@pytest.mark.parametrize("num_calls", [1, 2, 5])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_every_mode_reduces_its_gradient_and_pays_for_what_it_frees(mode, num_calls):
    assert mode.num_reduce_scatters() == 1
    assert mode.num_all_gathers(num_calls) == (1 if mode.resident else num_calls + 1)


def test_with_four_micro_batches_only_dp_that_reduces_in_the_last_gathers_once_a_step():
    collectives = {
        (mode.name, mode.sync): (mode.num_all_gathers(1, 4), mode.num_reduce_scatters(4)) for mode in ALL_MODES
    }
    assert collectives == {
        ("ZDP", "every"): (8, 4),
        ("DP", "every"): (4, 4),
        ("ZDP", "last"): (8, 1),
        ("DP", "last"): (1, 1),
    }


def test_a_mode_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZDP.resident = True
