import pytest

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.search import Choice, Group, Problem
from lightning_osdp.planner.search.exhaustive import exhaustive

BINARY = (Choice(2.0, 0), Choice(1.0, 10))


def test_it_looks_at_every_row_of_counts():
    # 3 members of 2 choices: 4 rows; 2 members of 3 choices: 6 rows
    groups = (Group(choices=BINARY, count=3), Group(choices=(*BINARY, Choice(0.0, 20)), count=2))
    solution = exhaustive(Problem(groups=groups, budget_bytes=35))
    assert solution.num_nodes == 24
    assert solution.time_s == 10.0 - 3.0
    assert solution.memory_bytes == 30


def test_between_equally_fast_assignments_it_takes_the_smallest():
    group = Group(choices=(Choice(1.0, 20), Choice(1.0, 10)), count=2)
    assert exhaustive(Problem(groups=(group,), budget_bytes=40)).counts == ((0, 2),)


def test_a_large_problem_is_refused_with_what_to_do():
    problem = Problem(groups=(Group(choices=BINARY),) * 40, budget_bytes=100)
    with pytest.raises(ConfigurationError) as raised:
        exhaustive(problem)
    assert str(raised.value) == (
        "search='exhaustive' expects a problem with at most 100,000 assignments, got 1.1e+12 (40 operators in 40"
        " groups of equal ones). Use search='depth_first', which is exact as well and cuts what cannot be best."
    )
