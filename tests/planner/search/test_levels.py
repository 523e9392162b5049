"""Levels against all sets of results that a block may keep."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.planner.search.levels import ENOUGH, Result, find_levels
from tests.support.tiers import examples

MMS = 7.5e-12  # seconds per byte of a Llama block's products, 13-fold those of what runs between them


def line(points, num_bytes):
    """Seconds of the best mixture of two of these points, of bytes and seconds, in so many bytes."""
    at = [s for size, s in points if size <= num_bytes]
    for (size, s), (other, other_s) in combinations(sorted(points), 2):
        if size <= num_bytes <= other and other > size:
            at.append(s + (num_bytes - size) / (other - size) * (other_s - s))
    return min(at)


def point(results, kept, nothing_s, overhead_s):
    seconds = sum(results[position].seconds for position in kept)
    return sum(results[position].num_bytes for position in kept), nothing_s + overhead_s - seconds


@examples(150)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 50)), max_size=7),
    st.integers(0, 30),
    st.sampled_from([0.0, 0.5, 5.0]),
    st.integers(1, 4),
)
def test_no_mixture_of_any_sets_saves_more_than_the_gap(pairs, rest_s, overhead_s, most):
    results = [Result(float(s), float(size)) for s, size in pairs]
    nothing_s = sum(each.seconds for each in results) + rest_s
    everything = sum(each.num_bytes for each in results) + 10.0, 0.0
    found = find_levels(results, nothing_s=nothing_s, everything_bytes=everything[0], overhead_s=overhead_s, most=most)
    assert len(found.kept) <= most
    assert all([*kept] == sorted({*kept}) for kept in found.kept)
    levels = [(0.0, nothing_s), everything, *(point(results, kept, nothing_s, overhead_s) for kept in found.kept)]
    for number in range(1, len(results) + 1):
        for kept in combinations(range(len(results)), number):
            num_bytes, time_s = point(results, kept, nothing_s, overhead_s)
            assert line(levels, num_bytes) <= time_s + found.gap * nothing_s + 1e-9
    if len(found.kept) < most:
        assert found.gap <= ENOUGH


def llama(tokens, width=4096, hidden=14336):
    """Results of a block in order: q, k, v, attention, out, gate, up; seconds of H100, bytes of bf16."""
    sizes = [width, width // 4, width // 4, width, width, hidden, hidden]
    seconds = [MMS * width * 2 * tokens * size / 4096 for size in sizes]
    seconds[3] = 2 * tokens * tokens * width / 396e12
    return [Result(s, 2.0 * tokens * size) for s, size in zip(seconds, sizes, strict=True)]


@pytest.mark.parametrize(("tokens", "first"), [(4096, 7), (32768, 1)])
def test_of_a_llama_block_all_products_are_one_level_and_attention_another_where_sequences_are_long(tokens, first):
    results = llama(tokens)
    products_s = sum(each.seconds for each in results)
    everything_bytes = 2.0 * tokens * (6 * 4096 + 2 * 1024 + 4 * 14336)
    found = find_levels(results, nothing_s=1.12 * products_s, everything_bytes=everything_bytes, most=4)
    assert found.kept[-1] == tuple(range(7))
    assert len(found.kept[0]) == first
    assert found.gap <= ENOUGH


def test_an_overhead_that_is_larger_than_what_levels_save_leaves_none():
    found = find_levels(
        [Result(1.0, 1.0), Result(1.0, 2.0)], nothing_s=3.0, everything_bytes=20.0, overhead_s=5.0, most=4
    )
    assert found == ((), 0.0)
