import json

import pytest

from benchmarks import search
from benchmarks.measures.search.plans import PlanRow
from benchmarks.measures.search.problems import equation_2, paper_groups, random_groups, sliced_groups, with_budget
from lightning_osdp.search import SOLVERS


@pytest.fixture
def result(tmp_path, capsys):
    """What a run at a tiny size writes, with what it prints under the key "printed"."""
    output = tmp_path / "results" / "search.json"
    search.main(output=output, sizes=[10], shares=[0.5], seeds=[0], num_runs=1, blocks=[2], num_small=3)
    return {**json.loads(output.read_text()), "printed": capsys.readouterr().out}


def test_every_row_has_a_certified_gap(result):
    assert {(row["problem"], row["solver"]) for row in result["rows"]} == {
        (problem, solver)
        for problem in (
            "random",
            "equation 2",
            "48 blocks x 2",
            "48 blocks x 2, 4 slices",
            "48 blocks x 2, not merged",
            "48 blocks x 2, 4 slices, not merged",
        )
        for solver in ("greedy", "depth_first")
    }
    for row in result["rows"]:
        assert 0 <= row["largest_gap"] < 0.1
        assert 0 < row["median_s"] <= row["slowest_s"]
        assert row["num_problems"] == 1


def test_the_table_the_targets_and_the_machine_are_printed(result):
    assert "largest gap" in result["printed"]
    assert "depth_first, 48 x 2: s" in result["printed"]
    assert f"Machine: {result['machine']}" in result["printed"]


def test_targets_take_the_worst_row():
    rows = [
        search.Row(
            problem=problem,
            num_operators=3000,
            num_choices="3-5",
            solver=solver,
            median_s=0.01,
            slowest_s=slowest_s,
            largest_gap=slowest_s / 1000,
            num_proven=0,
            num_problems=1,
        )
        for problem, solver, slowest_s in [
            ("random", "greedy", 0.05),
            ("equation 2", "greedy", 0.2),
            ("48 blocks x 2", "depth_first", 0.5),
        ]
    ]
    plans = [
        PlanRow(
            problem=problem,
            num_operators=10,
            overlaps=overlaps,
            median_s=1.0,
            slowest_s=slowest_s,
            largest_gap=gap,
            num_problems=1,
        )
        for problem, overlaps, slowest_s, gap in [
            ("modes, equal units", True, 1.0, 0.01),
            ("modes, equal units", True, 1.0, 0.06),
            ("modes, random units", True, 1.0, 1.0),
            ("modes and activations, 48 blocks", False, 0.4, 0.0),
            ("modes and activations, 48 blocks", True, 2.0, 0.1),
            ("modes and activations, 96 blocks", False, 3.0, 0.0),
        ]
    ]
    assert [(target.measured, target.is_met) for target in search.targets(rows, plans)] == [
        (0.2, False),
        (0.0002, True),
        (0.5, True),
        (0.4, True),
        (0.06, False),
    ]


def test_plans_are_made_with_and_without_overlap(result):
    assert [(row["problem"], row["num_operators"], row["overlaps"]) for row in result["plans"]] == [
        ("modes, equal units", 10, False),
        ("modes, random units", 10, False),
        ("modes, equal units", 10, True),
        ("modes, random units", 10, True),
        ("plan, 2 blocks", 15, False),
        ("plan, 2 blocks", 15, True),
        ("modes and activations, 2 blocks", 15, False),
        ("plan, 2 blocks, any", 15, False),
        ("modes and activations, 2 blocks", 15, True),
        ("plan, 2 blocks, any", 15, True),
    ]
    assert all(0 <= row["largest_gap"] < 1 and row["median_s"] <= row["slowest_s"] for row in result["plans"])


def test_small_models_are_compared_with_the_best_of_all_modes(result):
    small = result["small"]
    assert (small["num_problems"], small["num_violated"]) == (3, 0)
    assert 0 <= small["num_best"] <= 3
    assert -1e-9 <= small["largest_distance"] <= small["largest_gap"] + 1e-9
    assert "3 small models end with the best modes" in result["printed"]


@pytest.mark.parametrize("build", [random_groups, sliced_groups])
def test_a_seed_makes_one_problem_of_different_operators(build):
    groups = build(50, 1)
    assert groups == build(50, 1) != build(50, 2)
    assert len(set(groups)) == 50
    assert {len(group.choices) for group in groups} == {3, 4, 5}


def test_equation_2_equals_the_value_by_hand():
    # N = 8, alpha = 20 us, beta = 0.1 ns: all ZDP takes 3 (7 * 20 us + 7/8 * 0.8 ms), all DP two of three parts of it
    by_dp_and_zdp = equation_2(8_000_000, num_slices=1)
    assert [choice.time_s for choice in by_dp_and_zdp] == pytest.approx([2 * 840e-6, 3 * 840e-6])
    # four states of 8 MB, sharded by 8; DP adds the 7 MB of the parameter that are not there yet
    assert [choice.memory_bytes for choice in by_dp_and_zdp] == [11e6, 4e6]


def test_slices_pay_latency_each():
    whole, sliced = equation_2(8_000_000, num_slices=1), equation_2(8_000_000, num_slices=4)
    assert sliced[-1].time_s - whole[-1].time_s == pytest.approx(3 * 3 * 7 * 20e-6)
    assert sliced[-1].memory_bytes == whole[-1].memory_bytes


def test_merging_changes_no_optimum():
    problems = [with_budget(paper_groups(1, merged=merged, num_blocks=6), 0.4) for merged in (True, False)]
    merged, apart = (SOLVERS["depth_first"](problem) for problem in problems)
    assert merged.gap == apart.gap == 0
    assert merged.time_s == pytest.approx(apart.time_s)
