"""Corrections that steps of raced plans tell, beside what is so; and steps that tell none."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.correction import Correction
from lightning_osdp.planner.scheduler.replanning.correcting import MOST, MOST_ERROR, TOLD_APART, nearest
from tests.support.tiers import examples


def summed(computing, **links):
    """Seconds of a step in which nothing overlaps."""
    return lambda factor: computing + sum(factor(link) * seconds for link, seconds in links.items())


def hidden(computing, **links):
    """Seconds of a step in which half of computing goes on beside collectives."""
    return lambda factor: (
        computing / 2 + max(computing / 2, sum(factor(link) * seconds for link, seconds in links.items()))
    )


def taken(timed, wrong, noise=lambda: 1.0, number=3):
    """Seconds of steps if predictions are wrong by these factors."""
    of_links = Correction(links={link: factor / wrong.computing for link, factor in wrong.links.items()})
    return [[wrong.computing * each(of_links.factor) * noise() for _ in range(number)] for each in timed]


PARTS = st.floats(0.1, 3.0)
FACTORS = st.floats(1 / 3, 3.0)


@examples(60)
@given(
    kind=st.sampled_from([summed, hidden]),
    computing=PARTS,
    sent=st.lists(PARTS, min_size=3, max_size=7),
    times=FACTORS,
    of_links=FACTORS,
)
def test_steps_are_predicted_as_they_are_by_what_is_told_of_them(kind, computing, sent, times, of_links):
    timed = [kind(computing, all=seconds) for seconds in sent]
    seconds = taken(timed, Correction(computing=times, links={"all": of_links}))
    found, share = nearest(timed, seconds), of_links * max(sent) / (times * computing)
    if isinstance(found, str):
        assert kind is hidden or max(sent) < 4 * min(sent) or not 0.2 < share < 20
        return
    assert found.num_plans == len(sent)
    assert found.error <= found.error_before + 1e-6
    assert found.error <= MOST_ERROR
    if kind is summed:
        assert [own[0] for own in taken(timed, found)] == pytest.approx([own[0] for own in seconds], rel=0.03)
        assert 1 / TOLD_APART < found.links["all"] / found.computing * times / of_links < TOLD_APART


SENT = (3.0, 3.6, 4.8, 6.0, 9.0)


@pytest.mark.parametrize("kind", [summed, hidden])
def test_noise_of_a_percent_is_no_hindrance(kind):
    draw, wrong = random.Random(3), Correction(computing=1.8, links={"all": 0.6})
    timed = [kind(2.0, all=seconds) for seconds in SENT]
    found = nearest(timed, taken(timed, wrong, noise=lambda: draw.uniform(0.99, 1.01)))
    assert found.computing == pytest.approx(1.8, rel=0.1)
    assert found.links["all"] == pytest.approx(0.6, rel=0.15)
    assert 10 * found.error < found.error_before


def test_each_link_has_a_factor_of_its_own_and_one_that_nothing_takes_none():
    wrong = Correction(computing=1.5, links={"all": 0.5, "node": 2.5})
    parts = [(1.0, 0.2), (3.0, 0.2), (1.0, 1.5), (3.0, 1.5), (2.0, 0.6)]
    timed = [summed(2.0, all=over_all, node=in_node) for over_all, in_node in parts]
    found = nearest(timed, taken(timed, wrong), links=("all", "node"))
    assert found.computing == pytest.approx(1.5, rel=0.05)
    assert found.links == {"all": pytest.approx(0.5, rel=0.1), "node": pytest.approx(2.5, rel=0.1)}
    timed = [summed(2.0, all=over_all) for over_all, _ in parts]
    found = nearest(timed, taken(timed, wrong), links=("all", "node"))
    assert found.links == {"all": pytest.approx(0.5, rel=0.1), "node": 1.0}
    alone = [summed(each) for each in SENT]
    found = nearest(alone, taken(alone, wrong))
    assert (found.computing, found.links) == (pytest.approx(1.5), {"all": 1.0})


ALIKE = "its plans do not tell apart what is off of computing and of links"


@pytest.mark.parametrize(
    ("timed", "wrong", "reason"),
    [
        ([summed(1.0, all=each) for each in (1.0, 2.0)], Correction(), "2 plans are too few to tell 2 factors"),
        ([summed(1.0, all=1.0)] * 5, Correction(computing=2.0), ALIKE),
        ([summed(each, all=each) for each in SENT], Correction(computing=2.0), ALIKE),
        # twice as long in nodes is as if it were over all: all plans have as much of one as of the other
        ([summed(2.0, all=each, node=each) for each in SENT], Correction(links={"all": 2.0, "node": 1.0}), ALIKE),
        (
            [summed(1.0, all=each) for each in SENT],
            Correction(computing=2 * MOST, links={"all": 2 * MOST}),
            "predictions would be best with seconds that are more than 4 times as many, or as few",
        ),
    ],
)
def test_steps_that_tell_too_little_correct_nothing(timed, wrong, reason):
    links = ("all", "node") if "node" in wrong.links else ("all",)
    assert nearest(timed, taken(timed, wrong), links=links) == reason


def test_predictions_that_no_factors_mend_are_not_corrected():
    timed = [summed(1.0, all=each) for each in SENT]
    assert nearest(timed, [[2.0], [5.0], [2.0], [6.0], [2.0]]).startswith("predictions would be ")


def test_plans_of_more_steps_count_for_more():
    timed = [summed(3.0, all=each) for each in SENT]

    def found(number):
        seconds = taken(timed, Correction(), number=number)
        return nearest(timed, [*seconds[:2], [1.1 * seconds[2][0]], *seconds[3:]])

    assert found(1) == ALIKE
    assert found(9).computing == pytest.approx(1.0, rel=0.1)
    assert found(9).links["all"] == pytest.approx(1.0, rel=0.1)
