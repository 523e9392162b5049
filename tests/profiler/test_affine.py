"""Time over the micro-batch from two sizes, and batches of another size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.profiler.affine import Affine, another_size, resized

SECONDS = st.floats(min_value=0.0, max_value=1e3)


@given(st.integers(1, 64), SECONDS, SECONDS)
def test_no_part_is_negative_and_the_first_size_is_exact(size, seconds, other_seconds):
    found = Affine.through(size, seconds, another_size(size), other_seconds)
    assert found.fixed_s >= -1e-9
    assert found.per_sample_s >= 0.0
    assert found.fixed_s + size * found.per_sample_s == pytest.approx(seconds)


def test_both_points_are_met_where_time_grows_with_size_but_not_faster():
    found = Affine.through(8, 10.0, 4, 6.0)
    assert (found.fixed_s, found.per_sample_s) == (2.0, 1.0)
    assert Affine.proportional(8, 10.0) == Affine(fixed_s=0.0, per_sample_s=1.25)


def test_the_second_size_is_smaller_where_it_can_be():
    assert [another_size(size) for size in (1, 2, 3, 8)] == [2, 1, 1, 4]


def test_every_tensor_of_samples_is_resized_and_nothing_else():
    batch = {"x": torch.arange(8).view(4, 2), "weights": torch.ones(3), "y": [torch.arange(4)], "name": "a", "n": 4}
    half = resized(batch, 4, 2)
    assert half["x"].tolist() == [[0, 1], [2, 3]]
    assert half["y"][0].tolist() == [0, 1]
    assert half["weights"].tolist() == [1, 1, 1]
    assert (half["name"], half["n"]) == ("a", 4)
    assert resized([torch.arange(1)], 1, 2)[0].tolist() == [0, 0]


def test_a_batch_without_such_a_tensor_cannot_be_resized():
    assert resized({"x": torch.ones(3), "s": torch.tensor(1.0)}, 4, 2) is None
