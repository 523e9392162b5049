"""Gradients that a module clears itself are cleared."""

import pytest
from clearing_cases import clears_gradients

pytestmark = pytest.mark.distributed


def test_a_module_may_clear_gradients_of_all_its_parameters(ranks):
    assert ranks(2).run(clears_gradients) == [0.0, 0.0]
