"""Duties of every solver in the table, and of all solvers to each other."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planner.search import SOLVERS, Choice, Group, Problem
from lightning_osdp.planner.search.bound import relax
from tests.support.tiers import examples

EXACT = ("depth_first", "exhaustive")

TWO_KINDS = (
    Group(choices=(Choice(3.0, 10), Choice(2.0, 30)), count=4),
    Group(choices=(Choice(7.0, 20), Choice(5.5, 40), Choice(5.0, 70)), count=3),
)
PROBLEMS = {
    "two kinds": Problem(groups=TWO_KINDS, budget_bytes=190),
    "budget exactly the least": Problem(groups=TWO_KINDS, budget_bytes=100),
    "budget for everything": Problem(groups=TWO_KINDS, budget_bytes=330),
    "no limit": Problem(groups=TWO_KINDS, budget_bytes=math.inf),
    "single choices": Problem(groups=(Group(choices=(Choice(1.5, 8),), count=5), *TWO_KINDS), budget_bytes=200),
    "only single choices": Problem(groups=(Group(choices=(Choice(1.5, 8),), count=5),), budget_bytes=40),
    "empty groups": Problem(
        groups=(Group(choices=(), count=0), *TWO_KINDS, Group(choices=(Choice(9.0, 9),), count=0)), budget_bytes=190
    ),
    "no groups": Problem(groups=(), budget_bytes=0),
    "dominated choices": Problem(
        groups=(Group(choices=(Choice(2.0, 50), Choice(3.0, 10), Choice(4.0, 10), Choice(2.0, 30)), count=3),),
        budget_bytes=75,
    ),
    "equal choices": Problem(groups=(Group(choices=(Choice(2.0, 5), Choice(2.0, 5)), count=3),), budget_bytes=15),
    "a straight line, as slices make it": Problem(
        groups=(Group(choices=tuple(Choice(0.4 - 0.1 * k, 3 * k) for k in range(5)), count=4),), budget_bytes=23
    ),
    "nothing saves time": Problem(groups=(Group(choices=(Choice(0.0, 5), Choice(0.0, 1)), count=3),), budget_bytes=9),
    # 0.1 + 0.2 > 0.3 in floating point
    "bytes that are no binary fractions": Problem(
        groups=tuple(Group(choices=(Choice(1.0, 0.0), Choice(0.5, size)), count=3) for size in (0.1, 0.2, 0.3)),
        budget_bytes=0.3 * 3 + 0.2 + 0.1,
    ),
    "seconds that vanish beside the others": Problem(
        groups=(
            Group(choices=(Choice(2e-20, 0), Choice(1e-20, 1))),
            Group(choices=(Choice(9.0, 0), Choice(8.0, 5), Choice(2.0, 9)), count=2),
        ),
        budget_bytes=10,
    ),
    # 3 * (1.3 - 0.1) <= 3.9 - 3 * 0.1, but 3 * 1.3 > 3.9
    "bytes whose differences fit and whose sum does not": Problem(
        groups=(Group(choices=(Choice(2.0, 0.1), Choice(1.0, 1.3)), count=3),), budget_bytes=3.9
    ),
}


@pytest.fixture(params=SOLVERS)
def solver(request):
    return request.param


@pytest.fixture(params=PROBLEMS)
def problem(request):
    return PROBLEMS[request.param]


def test_the_table_has_the_solvers_that_users_are_told_of():
    assert {"depth_first", "greedy", "exhaustive"} <= set(SOLVERS)


def test_every_member_takes_one_choice(solver, problem):
    solution = SOLVERS[solver](problem)
    assert [sum(row) for row in solution.counts] == [group.count for group in problem.groups]
    assert [len(row) for row in solution.counts] == [len(group.choices) for group in problem.groups]
    assert all(taken >= 0 for row in solution.counts for taken in row)


def test_time_and_memory_are_those_of_the_counts_and_fit(solver, problem):
    solution = SOLVERS[solver](problem)
    taken = [
        (taken, choice)
        for group, row in zip(problem.groups, solution.counts, strict=True)
        for choice, taken in zip(group.choices, row, strict=True)
    ]
    assert solution.time_s == pytest.approx(sum(n * choice.time_s for n, choice in taken), rel=1e-12)
    assert solution.memory_bytes == pytest.approx(sum(n * choice.memory_bytes for n, choice in taken), rel=1e-12)
    assert solution.memory_bytes <= problem.budget_bytes


def test_the_bound_is_not_above_the_time(solver, problem):
    solution = SOLVERS[solver](problem)
    assert solution.bound_s <= solution.time_s
    assert solution.gap >= 0
    assert not solution.is_cut_short


def test_too_small_a_budget_raises_with_limit_and_least_bytes(solver):
    with pytest.raises(InfeasibleError) as raised:
        SOLVERS[solver](Problem(groups=TWO_KINDS * 100, budget_bytes=9_000))
    assert str(raised.value) == (
        "No assignment fits: the limit is 9,000 bytes, and 700 operators take at least 10,000 bytes, each with its"
        " smallest choice. Raise the limit by 1,000 bytes, or offer smaller choices."
    )


def test_unlimited_memory_gives_every_operator_its_fastest_choice(solver):
    solution = SOLVERS[solver](PROBLEMS["no limit"])
    assert solution.counts == ((0, 4), (0, 0, 3))
    assert solution.bound_s == solution.time_s == 23.0


@pytest.mark.parametrize("solver", EXACT)
def test_exact_solvers_prove_their_time(solver, problem):
    solution = SOLVERS[solver](problem)
    assert solution.bound_s == solution.time_s
    assert solution.time_s == pytest.approx(SOLVERS["exhaustive"](problem).time_s, rel=1e-12)


@pytest.mark.parametrize("solver", EXACT)
def test_more_memory_is_never_slower(solver):
    times = [
        SOLVERS[solver](dataclasses.replace(PROBLEMS["two kinds"], budget_bytes=budget)).time_s
        for budget in range(100, 340, 10)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] == 33.0
    assert times[-1] == 23.0


@st.composite
def problems(draw, seconds, sizes):
    """Problems that `exhaustive` takes, with a budget that some assignment keeps."""
    choices = st.builds(Choice, seconds, sizes)
    group = st.builds(
        lambda choices, count: Group(choices=tuple(choices), count=count),
        st.lists(choices, min_size=1, max_size=3),
        st.integers(0, 3),
    )
    groups = tuple(draw(st.lists(group, max_size=4)))
    least = Problem(groups=groups, budget_bytes=0).least_bytes
    most = math.fsum(group.count * max(choice.memory_bytes for choice in group.choices) for group in groups)
    share = draw(st.sampled_from((0.0, 0.3, 0.5, 0.8, 1.0)))
    return Problem(groups=groups, budget_bytes=least + share * (most - least))


coarse = problems(st.integers(0, 12).map(float), st.integers(0, 12).map(float))
"""Small whole numbers: many ties, many ways to fill the budget exactly."""
fine = problems(st.floats(1e-6, 1.0), st.integers(0, 2**33).map(float))
"""Problems as profiles have them: measured seconds, whole bytes."""


@pytest.mark.parametrize("problems", [coarse, fine], ids=["coarse", "fine"])
def test_solvers_agree_with_the_oracle(problems):
    @examples(200)
    @given(problem=problems)
    def agree(problem):
        best_s = SOLVERS["exhaustive"](problem).time_s
        rounding_s = 1e-11 * (1 + best_s)
        exact, quick = SOLVERS["depth_first"](problem), SOLVERS["greedy"](problem)
        assert not exact.is_cut_short
        assert exact.time_s == pytest.approx(best_s, abs=rounding_s)
        assert relax(problem).bound_s <= best_s + rounding_s
        assert quick.bound_s <= best_s + rounding_s
        assert best_s <= quick.time_s + rounding_s
        assert quick.time_s <= quick.bound_s * (1 + quick.gap) + rounding_s or quick.bound_s == 0

    agree()


@examples(60)
@given(problem=fine)
def test_the_order_of_groups_and_choices_does_not_matter(problem):
    turned = Problem(
        groups=tuple(Group(choices=group.choices[::-1], count=group.count) for group in problem.groups[::-1]),
        budget_bytes=problem.budget_bytes,
    )
    for name in ("depth_first", "exhaustive"):
        assert SOLVERS[name](turned).time_s == pytest.approx(SOLVERS[name](problem).time_s, rel=1e-11)
