import itertools
import math

import pytest

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planner.search import Choice, Group, Problem
from lightning_osdp.planner.search.bound import relax

# per member: 10 bytes save 4 s (rate 0.4), then 10 more save 2 s (0.2); the choice with 15 bytes lies above the hull
STEEP = Group(choices=(Choice(9.0, 10), Choice(5.0, 20), Choice(4.9, 25), Choice(3.0, 30)), count=2)
# 10 bytes save 3 s (0.3)
FLAT = Group(choices=(Choice(6.0, 0), Choice(3.0, 10)))


@pytest.mark.parametrize(
    ("budget_bytes", "bound_s", "price"),
    [
        (20, 24.0, 0.4),  # nothing but the least
        (30, 20.0, 0.4),  # one of two members takes its first step
        (35, 18.0, 0.4),  # ... and half of the other
        (40, 16.0, 0.3),
        (45, 14.5, 0.3),
        (60, 11.0, 0.2),
        (69, 9.2, 0.2),
        (70, 9.0, 0.0),  # everything fits: another byte saves nothing
        (math.inf, 9.0, 0.0),
    ],
)
def test_bound_and_price_worked_out_by_hand(budget_bytes, bound_s, price):
    relaxation = relax(Problem(groups=(STEEP, FLAT), budget_bytes=budget_bytes))
    assert relaxation.bound_s == pytest.approx(bound_s, rel=1e-15)
    assert relaxation.price == pytest.approx(price)


def test_a_budget_that_is_too_small_has_no_bound():
    with pytest.raises(InfeasibleError):
        relax(Problem(groups=(STEEP, FLAT), budget_bytes=19))


@pytest.mark.parametrize("seconds", [0.1, 1 / 3, 1e-5, 0.25])
@pytest.mark.parametrize("num_bytes", [3, 7, 1e8 / 3])
def test_steps_of_a_straight_line_stay_in_their_order(seconds, num_bytes):
    line = Group(choices=tuple(Choice((9 - k) * seconds, k * num_bytes) for k in range(10)))
    steps = relax(Problem(groups=(line,), budget_bytes=9 * num_bytes)).steps
    assert [step.source for step in steps] == [0, *(step.target for step in steps[:-1])]
    assert [step.rate for step in steps] == sorted((step.rate for step in steps), reverse=True)


def test_the_bound_is_convex_in_the_budget_and_never_rises(distinct_operators):
    problem = distinct_operators(50, share=1.0)
    budgets = [problem.budget_bytes * k / 20 for k in range(21)]
    bounds = [relax(Problem(groups=problem.groups, budget_bytes=budget)).bound_s for budget in budgets]
    saved = [before - after for before, after in itertools.pairwise(bounds)]
    assert min(saved) >= 0
    assert all(later <= sooner * (1 + 1e-9) for sooner, later in itertools.pairwise(saved))
