"""A quantity over the samples of a micro-batch, from one size or two."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.affine import Affine

VALUES = st.floats(min_value=0.0, max_value=1e3)


@given(st.integers(1, 64), st.integers(1, 64), VALUES, VALUES)
def test_no_part_is_negative_and_the_first_size_is_exact(size, distance, value, other_value):
    found = Affine.through(size, value, size + distance, other_value)
    assert found.fixed >= -1e-9
    assert found.per_sample >= 0.0
    assert found.at(size) == pytest.approx(value)


def test_both_points_are_met_where_it_grows_with_size_but_not_faster():
    found = Affine.through(8, 10.0, 4, 6.0)
    assert (found.fixed, found.per_sample) == (2.0, 1.0)
    assert Affine.proportional(8, 10.0) == Affine(fixed=0.0, per_sample=1.25)


def test_what_shrinks_with_size_is_fixed_and_what_grows_faster_than_size_is_proportional():
    assert Affine.through(8, 10.0, 4, 11.0) == Affine(fixed=10.0)
    assert Affine.through(8, 8.0, 4, 1.0) == Affine(per_sample=1.0)


def test_affine_quantities_add_up():
    total = sum((Affine(1.0, 2.0), Affine(3.0, 4.0)), Affine())
    assert total == Affine(4.0, 6.0)
    assert total - Affine(1.0, 2.0) == Affine(3.0, 4.0)
    assert total * 0.5 == Affine(2.0, 3.0)
    assert total.at(10) == 64.0
