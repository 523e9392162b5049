"""Batches of many lengths at their smallest."""

import json

import pytest

from benchmarks import lengths as program
from benchmarks.measures.lengths import QUICK_CASES, Case, lengths_of, targets


@pytest.mark.distributed
@pytest.mark.slow
def test_plans_change_and_all_is_written(tmp_path, capsys):
    output = tmp_path / "results.json"
    program.main(output=output, quick=True)
    rows = json.loads(output.read_text())["lengths"]["rows"]
    assert [row["case"]["order"] for row in rows] == [case.order for case in QUICK_CASES]
    for row in rows:
        assert row["changing"]["num_changes"] > 0
        assert row["longest"]["num_changes"] == 0
        assert row["changing"]["total_s"] > row["changing"]["short_s"] > 0
    assert "mixed lengths, seconds over the longest's plan" in capsys.readouterr().out


def test_lengths_grow_or_are_mixed_by_rank():
    growing, mixed = (Case(order, (8, 16), num_layers=1, num_steps=9, num_rounds=1) for order in ("growing", "mixed"))
    assert lengths_of(growing, 0) == lengths_of(growing, 1) == [8] * 6 + [16] * 3
    assert lengths_of(mixed, 0)[:3] == [8] * 3
    assert lengths_of(mixed, 0) != lengths_of(mixed, 1)
    assert {*lengths_of(mixed, 0)} == {8, 16}


def test_targets_are_about_all_steps_of_mixed_lengths_and_about_short_ones():
    row = {"changing": {"total_s": 10.2, "short_s": 1.0}, "longest": {"total_s": 10.0, "short_s": 1.2}}
    rows = [{"case": {"order": order}, **row} for order in ("growing", "mixed")]
    found = [(round(each.measured, 2), each.is_met) for each in targets(rows)]
    assert found == [(1.2, True), (1.02, True), (1.2, True)]
