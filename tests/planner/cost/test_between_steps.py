"""Evaluation and saving, worked out by hand.

Three units of P = 40, 80, 120 bytes under Adam on two ranks: shards 120, Adam 240, whole states 240 + 480. A segment
takes e_i = 10, 90, 4 and 2 bytes of two samples, or the buffer that a unit is copied out of, whichever is more.
"""

import dataclasses

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, RESIDENT, ZDP
from lightning_osdp.planner.cost import evaluation_peak, saving_peak
from tests.support.steps import step_of


@pytest.fixture
def three(model):
    profile = model(40, 80, 120, batch_bytes_per_sample=1.0)
    segments = [
        dataclasses.replace(segment, evaluation_bytes=Affine(0.0, size))
        for segment, size in zip(profile.segments, (5.0, 45.0, 2.0, 1.0), strict=True)
    ]
    return dataclasses.replace(profile, segments=tuple(segments))


def given(profile, modes, *, world_size=2):
    step = step_of(profile, world_size=world_size, micro_batch_size=2)
    return step, [DP, *({"D": DP, "Z": ZDP}[letter] for letter in modes)]


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ("ZZZ", 362 + 120 + 120),  # P_2, and its buffer while it is copied out
        ("DDD", 362 + 240 + 120),  # all of them, of which m2 is the last to be copied out
        ("DZZ", 362 + 40 + 120 + 120),
        ("ZZD", 362 + 120 + 80 + 90),  # P_2 stays from the batch before
        ("DZD", 362 + 40 + 120 + 80 + 90),
    ],
)
def test_evaluation_keeps_what_is_dp_and_gathers_the_rest(three, modes, expected):
    # two samples: base 120 + 240 + 2 of the batch
    assert evaluation_peak(*given(three, modes)) == expected


def test_evaluation_gathers_no_resident_unit(three):
    step, (*modes, _) = given(three, "DDD")
    # no buffer of m2, which leaves the second segment's own, and no shard of m2
    assert evaluation_peak(step, [*modes, RESIDENT]) == 362 + 240 + 90 - 60


def test_what_libraries_keep_is_there_between_steps_too(three):
    step, modes = given(three, "DZD")
    kept = dataclasses.replace(step, cluster=dataclasses.replace(step.cluster, library_workspace_bytes=1000))
    assert evaluation_peak(kept, modes) == evaluation_peak(step, modes) + 1000
    assert saving_peak(kept, modes, is_sharded=True) == saving_peak(step, modes, is_sharded=True) + 1000


def test_one_rank_copies_its_shards_in_evaluation_without_a_buffer(three):
    assert evaluation_peak(*given(three, "DDD", world_size=1)) == 240 + 480 + 2 + 240 + 90


@pytest.mark.parametrize(
    ("options", "modes", "expected"),
    [
        # between steps 360, the largest unit and a shard of it 120 + 60
        ({"is_sharded": False}, "ZZZ", 360 + 180 + 720),
        ({"is_sharded": True}, "ZZZ", 360 + 180 + 360),
        # an evaluation has left units gathered
        ({"is_sharded": False}, "DDZ", 360 + 180 + 120 + 720),
    ],
)
def test_saving_holds_state_dicts_where_they_stay_on_the_device(three, options, modes, expected):
    assert saving_peak(*given(three, modes), **options) == expected
