"""m_ZDP and m_DP by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.cost.paper import model_states_bytes


def num_bytes(unit, world_size):
    """Of ZDP and of DP."""
    return [model_states_bytes(unit, mode, world_size) for mode in (ZDP, DP)]


@pytest.mark.parametrize(
    ("world_size", "zdp_bytes", "dp_bytes"),
    [
        # parameters 80, gradients 80, Adam 160
        (2, 160.0, 200.0),  # 320 / 2;  80 + 240 / 2
        (4, 80.0, 140.0),  # 320 / 4;  80 + 240 / 4
        (8, 40.0, 110.0),  # 320 / 8;  80 + 240 / 8
        (1, 320.0, 320.0),
    ],
)
def test_dp_keeps_the_parameter_whole_and_shards_the_rest(unit, world_size, zdp_bytes, dp_bytes):
    assert num_bytes(unit(80), world_size) == [zdp_bytes, dp_bytes]


def test_a_frozen_unit_is_its_parameter(unit):
    assert num_bytes(unit(80, frozen=True), 4) == [20.0, 80.0]


def test_dp_keeps_the_parameter_as_it_is_gathered(unit):
    # half precision: 40 gathered bytes, and gradients and Adam at rest, (80 + 160) / 4
    half = unit(80, gathered_bytes=40, gradient_bytes=40)
    assert num_bytes(half, 4) == [80.0, 100.0]


@settings(deadline=None, max_examples=50)
@given(parameter_bytes=st.integers(0, 2**35), frozen=st.booleans(), world_size=st.integers(1, 512))
def test_zdp_is_never_bigger_than_dp(unit, parameter_bytes, frozen, world_size):
    zdp_bytes, dp_bytes = num_bytes(unit(parameter_bytes, frozen=frozen), world_size)
    assert 0 <= zdp_bytes <= dp_bytes * (1 + 1e-12)
