"""Sizes of the slices that an operator is cut into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.slices import slice_sizes
from lightning_osdp.errors import ConfigurationError


@given(st.data())
def test_slices_cover_all_features_evenly_and_the_larger_come_first(data):
    num_features = data.draw(st.integers(1, 1000))
    num_slices = data.draw(st.integers(1, num_features))
    sizes = slice_sizes(num_features, num_slices)
    assert (len(sizes), sum(sizes)) == (num_slices, num_features)
    assert 1 <= sizes[-1] <= sizes[0] <= sizes[-1] + 1
    assert list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("num_features", "num_slices"), [(4, 0), (4, -1), (4, 5), (0, 1)])
def test_no_slice_is_empty(num_features, num_slices):
    with pytest.raises(ConfigurationError, match=rf"between 1 and {num_features} slices.*got {num_slices}\. Ask for"):
        slice_sizes(num_features, num_slices)
