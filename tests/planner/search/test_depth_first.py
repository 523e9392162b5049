import math
import random

import pytest

from lightning_osdp.planner.search import Choice, Group, Problem
from lightning_osdp.planner.search.depth_first import NODE_BUDGET, depth_first
from lightning_osdp.planner.search.exhaustive import exhaustive
from lightning_osdp.planner.search.greedy import greedy


def dynamic_program_s(problem):
    """Least time by dynamic programming over whole bytes: an oracle for counts that `exhaustive` refuses."""
    budget = int(problem.budget_bytes)
    best = [0.0] * (budget + 1)
    for group in problem.groups:
        for _ in range(group.count):
            best = [
                min(
                    (best[b - c.memory_bytes] + c.time_s for c in group.choices if c.memory_bytes <= b),
                    default=math.inf,
                )
                for b in range(budget + 1)
            ]
    return best[budget]


def smallest(problem):
    """The worst first assignment: `greedy` is right so often that it would hide a wrong search."""
    counts = [[0] * len(group.choices) for group in problem.groups]
    for row, group in zip(counts, problem.groups, strict=True):
        row[min(range(len(row)), key=lambda c: (group.choices[c].memory_bytes, group.choices[c].time_s))] = group.count
    return counts


def search_from_smallest(problem, node_budget=NODE_BUDGET):
    return depth_first(problem, first=smallest(problem), node_budget=node_budget)


def random_problem(seed, *, num_groups, counts, size, cost=10):
    draw = random.Random(seed)
    groups = tuple(
        Group(
            choices=tuple(Choice(cost * draw.random(), draw.randint(0, size)) for _ in range(draw.randint(2, 5))),
            count=draw.choice(counts),
        )
        for _ in range(num_groups)
    )
    least = Problem(groups=groups, budget_bytes=0).least_bytes
    most = sum(group.count * max(choice.memory_bytes for choice in group.choices) for group in groups)
    return Problem(groups=groups, budget_bytes=least + draw.randint(0, int(most - least)))


@pytest.mark.parametrize("seed", range(12))
def test_many_members_agree_with_a_dynamic_program(seed):
    problem = random_problem(seed, num_groups=4, counts=(1, 4, 12), size=8)
    solution = search_from_smallest(problem)
    assert solution.time_s == pytest.approx(dynamic_program_s(problem), rel=1e-11)
    assert not solution.is_cut_short
    assert depth_first(problem).time_s == pytest.approx(solution.time_s, rel=1e-11)


@pytest.mark.parametrize("size", [6, 1000])
def test_from_the_worst_start_it_still_agrees_with_the_oracle(size):
    for seed in range(100):
        problem = random_problem(seed, num_groups=4, counts=(1, 1, 2), size=size)
        solution = search_from_smallest(problem)
        assert solution.time_s == pytest.approx(exhaustive(problem).time_s, rel=1e-11)
        assert solution.bound_s == solution.time_s


def test_a_choice_that_costs_most_of_the_excess_is_searched():
    # the LP mixes the outer two; the middle one costs 8.9 s beyond its price, of the 9.9 s that could be saved
    group = Group(choices=(Choice(10.0, 0), Choice(9.0, 99), Choice(0.0, 100)))
    solution = search_from_smallest(Problem(groups=(group,), budget_bytes=99))
    assert solution.counts == ((0, 1, 0),)


def test_a_bound_reached_early_is_a_bound():
    num_unproven = 0
    for seed in range(40):
        problem = random_problem(seed, num_groups=4, counts=(1, 1, 2), size=1000)
        best_s = exhaustive(problem).time_s
        for node_budget in (0, 1, 6, 12, 25):
            solution = search_from_smallest(problem, node_budget)
            num_unproven += solution.is_cut_short
            assert solution.bound_s <= best_s * (1 + 1e-12)
            assert best_s <= solution.time_s * (1 + 1e-12)
            assert solution.is_cut_short == (solution.bound_s < solution.time_s)
    assert num_unproven > 50


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("share", [0.1, 0.37, 0.5, 0.83])
def test_the_papers_blocks_are_proven_within_a_thousand_nodes(paper_blocks, share, slices):
    problem = paper_blocks(share=share, slices=slices)
    solution = depth_first(problem)
    assert solution.bound_s == solution.time_s <= greedy(problem).time_s
    assert 0 < solution.num_nodes < 1000


def test_equal_operators_may_be_one_group_or_many(paper_blocks):
    merged = paper_blocks(share=0.4, slices=1, num_blocks=6)
    apart = tuple(Group(choices=group.choices) for group in merged.groups for _ in range(group.count))
    solutions = [depth_first(problem) for problem in (merged, Problem(groups=apart, budget_bytes=merged.budget_bytes))]
    assert [solution.gap for solution in solutions] == [0, 0]
    assert solutions[0].time_s == pytest.approx(solutions[1].time_s)


def test_a_thousand_distinct_operators_are_proven(distinct_operators):
    solution = depth_first(distinct_operators(1000))
    assert solution.gap == 0
    assert not solution.is_cut_short


def test_three_thousand_operators_do_not_recurse(distinct_operators):
    problem = distinct_operators(3000, share=0.3)
    assert depth_first(problem).time_s <= greedy(problem).time_s


def test_three_thousand_members_of_one_group_do_not_recurse():
    slices = Group(choices=tuple(Choice(0.4 - 0.1 * k, 7 * k) for k in range(5)), count=3000)
    other = Group(choices=(Choice(1.0, 0), Choice(0.9, 5)), count=3000)
    solution = depth_first(Problem(groups=(slices, other), budget_bytes=50_001))
    assert not solution.is_cut_short
    assert solution.gap == 0


@pytest.fixture
def hopeless():
    """Operators that all save the same time per byte: which of them fill the budget best is a subset sum."""
    draw = random.Random(0)
    sizes = [draw.randint(10**5, 10**8) for _ in range(100)]
    groups = tuple(Group(choices=(Choice(1e-9 * size, 0), Choice(0.0, size))) for size in sizes)
    return Problem(groups=groups, budget_bytes=sum(sizes) // 2)


def test_past_the_node_budget_it_falls_back_and_says_so(hopeless):
    solution = depth_first(hopeless, node_budget=2000)
    first = greedy(hopeless)
    assert first.bound_s <= solution.bound_s < solution.time_s <= first.time_s
    assert 2000 <= solution.num_nodes < 2400
    assert solution.is_cut_short
    assert solution.time_s - solution.bound_s == pytest.approx(43.3e-6, rel=1e-3)
    assert solution.gap == pytest.approx(1.7e-5, rel=0.03)


def test_a_better_assignment_than_the_first_is_kept_past_the_node_budget(hopeless):
    solution = search_from_smallest(hopeless, 2000)
    assert solution.time_s < hopeless.time_s(smallest(hopeless))
    assert solution.is_cut_short


def test_the_node_budget_also_ends_the_search_for_a_groups_options():
    group = Group(choices=tuple(Choice(math.sqrt(20 - k), k**1.1) for k in range(12)), count=100)
    solution = depth_first(Problem(groups=(group,), budget_bytes=503.3), node_budget=10)
    assert solution.is_cut_short
    assert solution.counts == greedy(Problem(groups=(group,), budget_bytes=503.3)).counts
    assert solution.bound_s < solution.time_s
