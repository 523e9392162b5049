"""The benchmark of searches at a tiny size."""

import json

import pytest

from benchmarks import search


@pytest.mark.slow
def test_every_row_has_a_certified_gap(tmp_path, capsys):
    output = tmp_path / "results" / "search.json"
    search.main(output=output, sizes=[10], shares=[0.5], seeds=[0], num_runs=1, blocks=[2], num_small=3)
    result, printed = json.loads(output.read_text()), capsys.readouterr().out
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
    assert {(row["problem"], row["num_operators"], row["overlaps"]) for row in result["plans"]} == {
        (problem, 15 if "blocks" in problem else 10, overlaps)
        for problem in (
            "modes, equal units",
            "modes, random units",
            "plan, 2 blocks",
            "sweep, 2 blocks",
            "modes and activations, 2 blocks",
            "plan, 2 blocks, any",
        )
        for overlaps in (False, True)
    }
    assert all(0 <= row["largest_gap"] < 1 and row["median_s"] <= row["slowest_s"] for row in result["plans"])
    small = result["small"]
    assert (small["num_problems"], small["num_violated"]) == (3, 0)
    assert -1e-9 <= small["largest_distance"] <= small["largest_gap"] + 1e-9
    for text in ("largest gap", "depth_first, 48 x 2: s", "3 small models end with", f"Machine: {result['machine']}"):
        assert text in printed
