"""Pace of steps: what counts as slower, and when another race is asked for."""

import pytest

from lightning_osdp.planner.scheduler.replanning.pace import ALIKE, SLOWER, STEPS_APART, WATCHED_STEPS, Pace

LARGE, LARGER, LONGEST = 100, round(100 / ALIKE) - 1, 200


def steps(seconds, num_elements=LARGE, number=WATCHED_STEPS):
    return [(seconds, num_elements)] * number


def test_a_plan_is_accepted_with_its_first_steps_of_the_middle_size():
    pace = Pace().after([*steps(9.0, 10, number=20), *steps(1.0, LARGE), *steps(2.0, LONGEST, number=20)])
    assert (pace.accepted_s, pace.num_elements, pace.is_slower) == (1.0, LARGE, False)


@pytest.mark.parametrize(
    ("latest", "is_slower"),
    [
        (steps(0.99 * SLOWER), False),
        (steps(1.01 * SLOWER), True),
        (steps(1.01 * SLOWER, LARGER), True),
        (steps(1.01 * SLOWER, LONGEST), False),  # batches have become larger
        ([*steps(9.0, number=24), *steps(1.0, number=26)], False),  # as where another program runs for a while
        ([*steps(2.0, number=26), *steps(1.0, number=24)], True),
        ([*steps(2.0, number=25), *steps(9.0, LONGEST, number=25)], True),
        ([*steps(2.0, number=24), *steps(9.0, LONGEST, number=26)], False),
    ],
)
def test_most_steps_of_one_size_must_be_slower(latest, is_slower):
    assert Pace(accepted_s=1.0, num_elements=LARGE).after(latest).is_slower == is_slower


def test_steps_of_batches_without_tensors_are_alike():
    assert Pace().after(steps(1.0, 0)).after(steps(2.0, 0)).is_slower


def test_another_race_is_asked_for_after_a_while_and_as_long_as_steps_are_slower():
    pace, asked = Pace(accepted_s=1.0, num_elements=LARGE), []
    for _ in range(2 * STEPS_APART // WATCHED_STEPS):
        pace = pace.after(steps(2.0))
        asked.append(pace.allows_race and pace.is_slower)
    first = STEPS_APART // WATCHED_STEPS - 1
    assert asked == [False] * first + [True] * (len(asked) - first)
    assert not pace.after(steps(1.0)).is_slower
