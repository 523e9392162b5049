"""Known batches: which plan has room for a batch, by those that are known to fit."""

import math

import pytest

from lightning_osdp.planner.scheduler import KnownBatch, KnownBatches, Room, RunBatches
from lightning_osdp.planner.scheduler.replanning.known_batches import times_longer


def tokens(*shapes, dtype="int64"):
    return tuple((dtype, shape) for shape in shapes)


@pytest.mark.parametrize(
    ("shapes", "times"),
    [
        (tokens((4, 64), (4,)), 1.0),
        (tokens((2, 64), (2,)), 1.0),
        (tokens((4, 96), (4,)), 1.5),
        (tokens((2, 96), (4,)), 1.5),  # fewer samples make up for nothing: attention grows with the square of a length
        (tokens((8, 128), (4,)), 4.0),
        (tokens((4, 64), (12,)), 3.0),
        (tokens((4, 64)), math.inf),
        (tokens((4, 64), (4, 1)), math.inf),
        (tokens((4, 64), (4,), dtype="float32"), math.inf),
    ],
)
def test_how_many_times_longer_a_batch_is(shapes, times):
    assert times_longer(shapes, tokens((4, 64), (4,))) == times


def test_a_tensor_that_was_empty_is_taken_for_one_row():
    assert times_longer(tokens((3, 4)), tokens((0, 4))) == 3.0
    assert times_longer((), ()) == 1.0


def rooms(*factors):
    return tuple(Room(factor, 2 * factor) for factor in factors)


def test_a_batch_has_the_first_plan_from_which_on_all_have_room():
    known = KnownBatches(
        (
            KnownBatch(tokens((4, 64)), 4, rooms(1.0, 2.0, 4.0)),
            KnownBatch(tokens((1, 256)), 1, rooms(0.0, 0.0, 1.5)),
        )
    )
    assert known.plan_for(tokens((4, 64))) == 0
    assert known.plan_for(tokens((4, 65))) == 1
    assert known.plan_for(tokens((4, 129))) == 2
    assert known.plan_for(tokens((1, 300))) == 2  # by the second batch: by the first it is 4.7 times as long
    assert known.plan_for(tokens((4, 300))) == 3
    assert known.plan_for(tokens((1, 300), (1,))) == 3
    assert known.plan_for(tokens((4, 128)), evaluates=True) == 0
    assert known.plan_for(tokens((4, 129)), evaluates=True) == 1
    falling = known.under([rooms(2.0, 1.0, 2.0), rooms(0.0, 0.0, 0.0)])
    assert falling.plan_for(tokens((4, 96))) == 2
    assert falling.plan_for(tokens((4, 64))) == 0
    assert known.under([rooms(1.0), rooms(0.0)]).num_plans == 1


def test_a_batch_that_was_too_long_leaves_room_for_shorter_ones_only():
    assert Room(3.0, 4.0).below(4.0) == Room(3.0, 4.0)
    less = Room(3.0, 4.0).below(2.0)
    assert (1.999 < less.training < 2.0, less.evaluating) == (True, 4.0)
    assert Room(3.0, 4.0).below(1.0).training == 0  # not even the known one fits
    assert Room(3.0, 4.0).below(math.inf).training == 3.0  # other tensors


def test_batches_that_have_been_run_are_known_by_the_longest():
    run = RunBatches().after(tokens((4, 64))).after(tokens((2, 128)))
    assert run.longest == (tokens((4, 64)), tokens((2, 128)))
    assert [run.has_room(tokens(shape)) for shape in ((4, 64), (1, 100), (3, 100), (2, 129))] == [1, 1, 0, 0]
    assert not run.has_room(tokens((4, 64), (4,)))
    assert run.after(tokens((2, 64))) is run
    assert run.after(tokens((4, 128))).longest == (tokens((4, 128)),)
    assert not RunBatches().has_room(())
