"""Plans made from profiles, applied on two and four ranks: parameters that a unit frees are never read past it."""

import sys
from pathlib import Path

import pytest
from tiers import slow

sys.path.insert(0, str(Path(__file__).parent.parent / "profiler"))

from entangled_models import MODELS
from evaluation_cases import encoder_in_evaluation, padded_encoder_validates
from wrap_cases import gradients_differ_by, nested_units
from wrapped_units import NESTED, NESTED_IN_NODES, NESTED_PARAMETERS

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("modes", "world_size"),
    [
        slow(("ZDP",), 2),
        slow(("DP", "ZDP"), 2),
        (("HSDP", "HDP", "hpZ", "ZDP", "DP"), 4),
        slow(("DP", "ZDP"), 4),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_the_unwrapped_models(ranks, name, modes, world_size):
    for difference, units in ranks(world_size).run(gradients_differ_by, name=name, modes=modes):
        assert difference < 1e-6
        assert units[0] == ""


@pytest.mark.parametrize(
    ("world_size", "node_size", "nested"),
    [(2, None, NESTED), (4, 2, NESTED_IN_NODES), slow(4, None, NESTED)],
    ids=["two", "nodes", "four"],
)
def test_units_and_modes_are_exactly_the_plans(ranks, world_size, node_size, nested):
    for units, frozen_without_gradient in ranks(world_size).run(nested_units, units=nested, node_size=node_size):
        assert units == {name: (NESTED_PARAMETERS[name], mode) for name, (_, mode) in nested.items()}
        assert frozen_without_gradient


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_encoder_layers_whose_linears_are_units_evaluate_like_the_unwrapped_model(ranks, world_size):
    for difference, units in ranks(world_size).run(encoder_in_evaluation):
        assert "encoder.layers.0.linear1" in units
        assert difference < 1e-6


@pytest.mark.parametrize(
    ("share_units", "unit", "world_size"),
    [
        (False, "encoder.layers.0.linear1", 2),
        slow(False, "encoder.layers.0.linear1", 4),
        slow(True, "encoder.layers.0", 2),
    ],
)
def test_encoders_that_pack_padded_sequences_validate_like_the_unwrapped_model(ranks, share_units, unit, world_size):
    found = ranks(world_size).run(padded_encoder_validates, share_units=share_units)[0]
    assert unit in found["units"]
    assert found["times_packed"] >= 40  # validation in fit and after it, of 20 batches each
    in_fit, after_fit, expected = found["losses"]
    assert in_fit == pytest.approx(expected, rel=1e-5)
    assert after_fit == pytest.approx(expected, rel=1e-5)
