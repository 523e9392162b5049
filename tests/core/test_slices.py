"""Slices that an operator is cut into: their sizes, and a profile with slices for operators."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.slices import slice_sizes, split_operators
from lightning_osdp.core.units import partition
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


@pytest.fixture
def profile(model, linear, operator):
    """Two Linears, the first of which is called once more after the others."""
    made = model(
        linear("a", 10, 6, forward_s_per_sample=1.0, activation_bytes_per_sample=100),
        operator("norm", 24),
        linear("b", 6, 10, position=2, backward_s_per_sample=2.0),
    )
    again = dataclasses.replace(made.segments[0], forward_s=Affine(0.0, 3.0))
    spans = {**made.spans, "a": ((0, 0), (3, 3))}
    return dataclasses.replace(made, segments=(*made.segments[:-1], again, made.loss), spans=spans)


@pytest.mark.parametrize("counts", [{}, {"a": 1}, {"a": 3}, {"b": 6}, {"a": 10, "b": 4}])
def test_splitting_changes_no_sum(profile, counts):
    found = split_operators(profile, counts)
    for name in ("parameter_bytes", "num_trainable", "gathered_bytes", "trainable_bytes", "gradient_bytes"):
        assert sum(getattr(each, name) for each in found) == sum(getattr(each, name) for each in profile)
    assert sum(each.optimizer_bytes for each in found) == pytest.approx(
        sum(each.optimizer_bytes for each in profile), abs=10
    )
    assert found.saved_bytes == profile.saved_bytes
    for name in ("forward_s", "backward_s"):
        assert sum(getattr(each, name).at(2) for each in found.segments) == pytest.approx(
            sum(getattr(each, name).at(2) for each in profile.segments)
        )
    assert found.fingerprint == profile.fingerprint
    assert found.loss == profile.loss
    assert [segment.operator for segment in found.segments if segment.operator == "norm"] == ["norm"]


def test_a_slice_is_an_operator_with_calls_of_its_own(profile):
    found = split_operators(profile, {"a": 3})
    assert [segment.operator for segment in found.segments] == [
        *("a.slices.0", "a.slices.1", "a.slices.2"),
        *("norm", "b"),
        *("a.slices.0", "a.slices.1", "a.slices.2", ""),
    ]
    assert found.spans["a"] == ((0, 2), (5, 7))
    assert found.spans["a.slices.1"] == ((1, 1), (6, 6))
    assert found.spans["norm"] == ((3, 3),)
    first, _, last = (each for each in found if each.name.startswith("a."))
    assert (first.enclosing, first.stands_alone) == (("a.slices.0", ""), True)
    assert [parameter.num_elements for parameter in first.parameters] == [4 * 6]
    assert [parameter.num_elements for parameter in last.parameters] == [3 * 6, 6]  # and the bias
    units = partition(found, min_unit_bytes=10**6)
    assert [unit.name for unit in units] == ["", "a.slices.0", "a.slices.1", "a.slices.2"]


def test_slices_after_the_first_take_the_host_time_at_each_call(profile):
    without, found = (split_operators(profile, {"a": 3}, slice_s=each_s) for each_s in (0.0, 0.5))
    for name in ("forward_s", "backward_s"):
        pairs = zip(found.segments, without.segments, strict=True)
        more_s = [(getattr(each, name) - getattr(before, name)).at(2) for each, before in pairs]
        assert more_s == pytest.approx([0.0, 0.25, 0.25, 0.0, 0.0, 0.0, 0.25, 0.25, 0.0])


@pytest.mark.parametrize(("cuts_rows", "rows"), [(False, [(6,), (6,), (6, 6)]), (True, [(4,), (3,), (3, 6)])])
def test_rows_are_cut_where_they_are_the_features(profile, cuts_rows, rows):
    first, *others = profile.operators
    weight, bias = (dataclasses.replace(parameter, num_rows=6) for parameter in first.parameters)
    cut = dataclasses.replace(first.cut, cuts_rows=cuts_rows)
    first = dataclasses.replace(first, parameters=(weight, bias), cut=cut)
    found = split_operators(dataclasses.replace(profile, operators=(first, *others)), {"a": 3})
    assert [tuple(part.num_rows for part in each.parameters) for each in found if each.name.startswith("a.")] == rows


def test_only_what_can_be_cut_is_split(profile):
    with pytest.raises(ConfigurationError, match="an operator that can be split, got 'norm'"):
        split_operators(profile, {"norm": 2})
    with pytest.raises(ConfigurationError, match="between 1 and 6 slices"):
        split_operators(profile, {"b": 7})
