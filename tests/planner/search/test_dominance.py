from lightning_osdp.planner.search import Choice
from lightning_osdp.planner.search.dominance import Skyline, frontier, hull


def test_frontier_drops_what_another_beats_in_time_and_memory():
    choices = [Choice(5.0, 10), Choice(5.0, 11), Choice(4.0, 20), Choice(4.5, 20), Choice(4.0, 30), Choice(1.0, 40)]
    assert frontier(choices) == [0, 2, 5]


def test_of_equal_choices_the_first_stays():
    assert frontier([Choice(1.0, 1), Choice(1.0, 1)]) == [0]


def test_frontier_of_no_choices_is_empty():
    assert frontier([]) == []


def test_hull_drops_what_a_mixture_of_its_neighbours_beats():
    choices = [Choice(10.0, 0), Choice(9.0, 1), Choice(2.0, 2), Choice(1.9, 3), Choice(0.0, 4)]
    assert hull(choices, frontier(choices)) == [0, 2, 4]


def test_hull_keeps_choices_on_a_straight_line():
    choices = [Choice(3.0, 0), Choice(2.0, 1), Choice(1.0, 2)]
    assert hull(choices, frontier(choices)) == [0, 1, 2]


def test_a_point_takes_the_place_of_those_it_dominates():
    skyline = Skyline()
    assert skyline.add(3, 3.0)
    assert skyline.add(4, 2.0)
    assert skyline.add(3, 1.0)
    assert not skyline.add(4, 1.5)
    assert skyline.add(2, 3.0)


def test_times_within_the_tolerance_are_equal():
    skyline = Skyline(tolerance_s=0.1)
    assert skyline.add(1, 1.0)
    assert not skyline.add(1, 0.95)
    assert skyline.add(1, 0.8)
