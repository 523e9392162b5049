"""Races of plans: they end in time, and the fastest wins."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.planner.scheduler.replanning.race import CLEARLY, COUNTED_STEPS, NEAR, TURNS, Race

RACERS = st.lists(st.tuples(st.floats(0.01, 10.0), st.booleans()), min_size=1, max_size=9)
"""True seconds of a step, and whether the racer is a baseline."""


def run(racers, noise=lambda seconds: seconds, slow_first=1.0):
    """Runs a race; gives the race, and the racer of each step."""
    race, steps = Race.of([is_plain for _, is_plain in racers]), []
    while (turn := race.turn) is not None:
        seconds = [noise(racers[turn.racer][0]) for _ in range(turn.num_steps)]
        seconds[0] *= slow_first
        race, steps = race.after(seconds), [*steps, *[turn.racer] * turn.num_steps]
    return race, steps


@given(RACERS)
def test_the_fastest_wins_where_nothing_disturbs(racers):
    race, _ = run(racers)
    assert racers[race.winner][0] == min(seconds for seconds, _ in racers)


@given(RACERS, st.floats(1.0, 1000.0))
def test_the_first_step_of_a_turn_does_not_count(racers, slow_first):
    race, steps = run(racers, slow_first=slow_first)
    other, others = run(racers)
    assert (race.winner, steps) == (other.winner, others)


@given(RACERS, st.randoms())
def test_it_ends_within_the_steps_that_were_told_whatever_is_measured(racers, draw):
    told = Race.of([is_plain for _, is_plain in racers]).most_steps
    race, steps = run(racers, noise=lambda _: draw.uniform(0.01, 10.0))
    assert len(steps) <= told
    assert race.most_steps == 0
    assert race.running == (race.winner,)


@given(RACERS)
def test_steps_that_are_left_never_become_more(racers):
    race = Race.of([is_plain for _, is_plain in racers])
    while (turn := race.turn) is not None:
        after = race.after([racers[turn.racer][0]] * turn.num_steps)
        assert after.most_steps <= race.most_steps - turn.num_steps
        race = after


@given(RACERS, st.floats(0.0, 0.1), st.integers(0, 1000))
def test_noise_makes_a_winner_slower_than_the_fastest_by_no_more_than_it_can_hide(racers, noise, seed):
    draw = random.Random(seed)
    race, _ = run(racers, noise=lambda seconds: seconds * draw.uniform(1 - noise, 1 + noise))
    error = CLEARLY * 1.86 * noise  # of medians of two steps that scatter as far as they can
    hidden = (1 + noise) ** 2 / ((1 - noise) * (1 - noise - error))
    assert racers[race.winner][0] <= hidden * min(seconds for seconds, _ in racers) * (1 + 1e-9)


def wins(racers, *, number=200, scatter=0.03):
    """Shares of races that each racer wins where steps scatter, and a few take half as long again."""
    draw, won = random.Random(7), [0] * len(racers)

    def noise(seconds):
        return seconds * draw.lognormvariate(0.0, scatter) * (1.5 if draw.random() < 0.02 else 1.0)

    for _ in range(number):
        won[run(racers, noise=noise)[0].winner] += 1
    return [each / number for each in won]


def test_chance_makes_no_other_plan_win_unless_it_is_faster():
    plain = [(1.6, True), (1.05, True)]
    assert wins([(1.0, False), *[(1.02, False)] * 4, *plain])[0] > 0.95
    assert wins([(1.0, False), *[(1.0, False)] * 4, *plain], scatter=0.1)[0] > 0.8
    assert wins([(1.0, False), (1.02, False)])[0] > 0.8  # after two counted steps each
    assert wins([(1.0, False), (1.03, False), (0.95, False), (1.1, False), (1.2, False), *plain])[2] > 0.85
    assert wins([(1.0, False), (1.03, False), (0.85, False), (1.1, False), (1.2, False), *plain])[2] > 0.95


def test_racers_alternate_and_the_first_goes_on_with_the_faster_ones():
    race, steps = run([(4.0, False), (1.0, False), (3.0, False), (2.0, False), (2.5, False)])
    turn = 1 + COUNTED_STEPS
    rounds = ((0, 1, 2, 3, 4), (0, 1, 3) * TURNS, (0, 1) * TURNS)
    assert steps == [each for racers in rounds for racer in racers for each in [racer] * turn]
    assert race.winner == 1
    assert [len(seconds) for seconds in race.seconds] == [10, 10, 2, 6, 2]


def test_a_baseline_has_one_counted_step_and_leaves_unless_it_is_near_the_fastest():
    race, steps = run([(1.0, False), (1.05 * NEAR, True), (0.95 * NEAR, True)])
    assert steps.count(1) == 2
    assert steps.count(2) == 2  # half of two is one
    assert race.winner == 0
    race, steps = run([(1.0, False), (3.0, False), (0.9, True)])
    assert steps.count(2) == 2 + TURNS * (1 + COUNTED_STEPS)
    assert race.winner == 2


@given(RACERS.filter(lambda racers: len(racers) > 1), st.data())
def test_who_cannot_go_on_leaves_and_the_fastest_of_the_others_wins(racers, data):
    """The first racer can; the others may leave in any of their turns."""
    race, left = Race.of([False, *(is_plain for _, is_plain in racers[1:])]), {*range(len(racers))}
    while (turn := race.turn) is not None:
        told = race.most_steps
        if turn.racer and data.draw(st.booleans()):
            race, left = race.without(turn.racer), left - {turn.racer}
            assert race.most_steps < told
        else:
            race = race.after([racers[turn.racer][0]] * turn.num_steps)
        assert {*race.running, *race.waiting} <= left
    assert race.winner in left
    assert 0 in left
    if len(left) == 1:
        assert race.winner == 0


def test_only_the_racer_whose_turn_it_is_leaves_and_another_has_had_one():
    race = Race.of([False, False])
    with pytest.raises(
        ValueError, match=r"Expected the racer of Turn\(racer=0, num_steps=3\), and another one that has"
    ):
        race.without(0)
    race = race.after([1.0] * 3)
    with pytest.raises(ValueError, match=r"another one that has had a turn, got 0\."):
        race.without(0)
    assert race.without(1).winner == 0


def test_of_equal_racers_the_first_wins():
    assert run([(1.0, False)] * 5)[0].winner == 0


def test_one_racer_has_won():
    race = Race.of([False])
    assert (race.turn, race.winner, race.most_steps) == (None, 0, 0)


def test_the_steps_of_a_full_race_are_few():
    assert Race.of([False] * 5 + [True] * 2).most_steps == 55


def test_a_turn_has_all_its_steps():
    race = Race.of([False, False])
    with pytest.raises(ValueError, match=r"Expected the seconds of the steps of Turn\(racer=0, num_steps=3\), got 2"):
        race.after([1.0, 1.0])
    with pytest.raises(ValueError, match="Expected the seconds of the steps of None, got 1"):
        run([(1.0, False)])[0].after([math.inf])
    with pytest.raises(ValueError, match="Expected at least one racer, got none"):
        Race.of([])
