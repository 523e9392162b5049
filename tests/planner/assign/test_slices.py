"""Operators split into more slices where that lowers the peak."""

import pytest

from lightning_osdp.core.axes import DP, ZDP
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting, assign_modes, ever_more_slices
from lightning_osdp.planner.assign.merging.slices import agreed_on
from lightning_osdp.planner.cost import Workload
from lightning_osdp.planner.engine import FSDP2

CHOICES = (1, 2, 4, 8, 16)


@pytest.fixture
def wide(model, linear, cluster):
    """A large Linear between small ones, under two ranks."""
    profile = model(
        linear("a", 16, 16), linear("large", 64, 64, position=1), linear("b", 16, 16, position=2), fingerprint={}
    )
    return Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=0),
        cluster=cluster(2, latency_s=0.001, seconds_per_byte=1e-6),
        workload=Workload(micro_batch_size=1),
        engine=FSDP2(backward_prefetch="none"),
    )


def least_bytes(found):
    return found.costs.peak(found.costs.least_memory_modes).peak_bytes


def test_what_binds_is_split_as_long_as_that_lowers_the_peak(wide):
    found = list(ever_more_slices(wide, CHOICES))
    assert [each.decided.num_slices["large"] for each in found][:3] == [2, 4, 8]
    peaks = [least_bytes(wide), *map(least_bytes, found)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    assert all(each.decided.num_slices.keys() == {"large"} for each in found[:2])
    assert found[-1].decided.num_slices.get("a", 1) <= 2  # small ones are left alone while a large one binds


def test_no_operator_has_more_slices_than_are_offered_or_than_it_has_features(wide):
    assert all(each.decided.num_slices == {"large": 3} for each in ever_more_slices(wide, (1, 3)))
    assert not list(ever_more_slices(wide, (1, 65)))
    assert not list(ever_more_slices(wide, (1,)))


def test_slices_of_an_operator_reduce_their_gradients_alike(wide):
    split = next(ever_more_slices(wide.at(1, 4), (1, 2)))
    last = DP.but(sync="last")
    chosen = {"": DP, "a": last, "large.slices.0": last, "large.slices.1": ZDP, "b": DP}
    agreed = agreed_on(split, tuple(chosen[unit.name] for unit in split.units))
    assert dict(zip([unit.name for unit in split.units], agreed, strict=True)) == {**chosen, "large.slices.0": DP}


def test_with_slices_a_part_of_an_operator_is_kept(wide):
    split = list(ever_more_slices(wide, (1, 4)))[-1]
    limit_bytes = (least_bytes(split) + split.costs.peak(tuple(DP for _ in split.units)).peak_bytes) // 2
    modes = assign_modes(split, memory_limit_bytes=limit_bytes).modes
    slices = [mode for unit, mode in zip(split.units, modes, strict=True) if unit.name.startswith("large")]
    assert set(slices) == {ZDP, DP}
