"""Plans made from profiles, applied on two ranks: parameters that a unit frees are never read past it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "profiler"))

from entangled_models import MODELS
from evaluation_cases import encoder_in_evaluation
from wrap_cases import gradients_differ_by, nested_units
from wrapped_units import NESTED, NESTED_PARAMETERS

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("modes", [("ZDP",), ("DP", "ZDP")], ids="-".join)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_the_unwrapped_models(ranks, name, modes):
    for difference, units in ranks(2).run(gradients_differ_by, name=name, modes=modes):
        assert difference < 1e-6
        assert units[0] == ""


def test_units_and_modes_are_exactly_the_plans(ranks):
    for units, frozen_without_gradient in ranks(2).run(nested_units):
        assert units == {name: (NESTED_PARAMETERS[name], mode) for name, (_, mode) in NESTED.items()}
        assert frozen_without_gradient


def test_encoder_layers_whose_linears_are_units_evaluate_like_the_unwrapped_model(ranks):
    for difference, units in ranks(2).run(encoder_in_evaluation):
        assert "encoder.layers.0.linear1" in units
        assert difference < 1e-6
