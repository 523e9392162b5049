import pytest

from lightning_osdp.planner.search import Choice, Group, Problem
from lightning_osdp.planner.search.greedy import greedy


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(("num_operators", "gap"), [(100, 2e-3), (400, 1e-4), (3000, 1e-5)])
def test_the_certified_gap_falls_with_the_number_of_operators(distinct_operators, num_operators, gap, share):
    assert greedy(distinct_operators(num_operators, share=share)).gap < gap


def test_a_step_that_does_not_fit_is_passed_over():
    large = Group(choices=(Choice(100.0, 0), Choice(0.0, 100)))
    small = Group(choices=(Choice(2.0, 0), Choice(1.0, 10)))
    assert greedy(Problem(groups=(large, small), budget_bytes=60)).counts == ((1, 0), (0, 1))


def test_an_upgrade_is_paid_for_by_a_downgrade():
    # by rate, the first takes 60 of 100 bytes for 6.6 s; the second needs all 100 and saves 10 s
    first = Group(choices=(Choice(6.6, 0), Choice(0.0, 60)))
    second = Group(choices=(Choice(10.0, 0), Choice(0.0, 100)))
    solution = greedy(Problem(groups=(first, second), budget_bytes=100))
    assert solution.counts == ((1, 0), (0, 1))
    assert solution.bound_s == pytest.approx(16.6 - 6.6 - 4.0)


def test_a_choice_off_the_hull_fills_what_is_left():
    group = Group(choices=(Choice(10.0, 0), Choice(9.0, 50), Choice(0.0, 100)))
    solution = greedy(Problem(groups=(group,), budget_bytes=99))
    assert solution.counts == ((0, 1, 0),)


def test_members_of_one_group_pay_for_each_other():
    group = Group(choices=(Choice(10.0, 0), Choice(6.0, 10), Choice(0.5, 28)), count=2)
    assert greedy(Problem(groups=(group,), budget_bytes=28)).counts == ((1, 0, 1),)


def test_a_downgrade_does_not_pay_for_its_own_member():
    # with what the first gives back, its own upgrade would save most; the second's is the best that is possible
    first = Group(choices=(Choice(10.0, 0), Choice(6.0, 10), Choice(0.0, 28)))
    second = Group(choices=(Choice(4.5, 0), Choice(0.0, 12)))
    assert greedy(Problem(groups=(first, second), budget_bytes=19)).counts == ((1, 0, 0), (0, 1))


def test_what_rounding_puts_over_the_budget_is_taken_back():
    group = Group(choices=(Choice(2.0, 0.1), Choice(1.0, 1.3)), count=3)
    assert greedy(Problem(groups=(group,), budget_bytes=3.9)).counts == ((1, 2),)


def test_the_papers_blocks_are_within_half_a_percent(paper_blocks):
    assert all(greedy(paper_blocks(share=share)).gap < 5e-3 for share in (0.1, 0.37, 0.5, 0.83))
