"""Batches of many lengths at their smallest."""

import json

import pytest

from benchmarks import contest as program
from benchmarks.measures.beside_fsdp.lengths import Case, lengths_of, targets


@pytest.mark.distributed
@pytest.mark.slow
def test_plans_change_and_all_is_written(tmp_path, capsys):
    output = tmp_path / "results.json"
    program.main("race", ["lengths"], output=output, num_rounds=1, quick=True)
    rows = json.loads(output.read_text())["lengths"]["rows"]
    assert [row["case"]["order"] for row in rows] == ["growing", "mixed"]
    for row in rows:
        assert row["changing"]["num_changes"] > 0
        assert row["longest"]["num_changes"] == 0
        assert row["changing"]["total_s"] > row["changing"]["short_s"] > 0
        assert row["changing"]["peak_bytes"] <= row["limit_bytes"] * 1.001
        assert row["changing"]["loss"] == pytest.approx(row["longest"]["loss"], abs=1e-5)
    assert "mixed lengths, seconds over the longest's plan" in capsys.readouterr().out


def test_lengths_grow_or_are_mixed_by_rank():
    fields = {"lengths": (8, 16), "num_layers": 1, "num_steps": 9, "num_ranks": 2, "room": 1.0, "num_rounds": 1}
    growing, mixed = (Case(order=order, **fields) for order in ("growing", "mixed"))
    assert lengths_of(growing, 0) == lengths_of(growing, 1) == [8] * 6 + [16] * 3
    assert lengths_of(mixed, 0)[:3] == [8] * 3
    assert lengths_of(mixed, 0) != lengths_of(mixed, 1)
    assert {*lengths_of(mixed, 0)} == {8, 16}


def test_targets_are_about_memory_losses_short_steps_and_all_steps_of_mixed_lengths():
    changing = {"total_s": 10.2, "short_s": 1.0, "peak_bytes": 90, "loss": 2.0}
    row = {"changing": changing, "longest": {"total_s": 10.0, "short_s": 1.2, "loss": 2.1}, "limit_bytes": 100}
    rows = [{"case": {"order": order}, **row} for order in ("growing", "mixed")]
    found = [(round(each.measured, 2), each.is_met) for each in targets(rows)]
    assert found == [(0.9, True), (0.1, False), (1.2, True), (0.9, True), (0.1, False), (1.02, True), (1.2, True)]
