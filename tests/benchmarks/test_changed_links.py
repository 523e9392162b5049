"""Links that change in mid-training, at their smallest."""

import json

import pytest

from benchmarks import contest as program
from benchmarks.measures.beside_fsdp.changed_links import table, targets


@pytest.mark.distributed
@pytest.mark.slow
def test_plans_race_again_when_all_gathers_come_to_wait(tmp_path, capsys):
    output = tmp_path / "results.json"
    program.main("race", ["changed links"], output=output, quick=True)
    (row,) = json.loads(output.read_text())["changed links"]["rows"]
    assert row["slow_s"] > row["before_s"] > 0
    assert row["num_raced"] > 0
    assert row["steps_until"] > row["num_raced"]
    assert min(row["after_s"], row["fresh_s"]) > 0
    assert "steps until the new plan" in capsys.readouterr().out


def test_a_plan_is_to_change_soon_and_to_be_as_good_as_a_new_one():
    case = {"model": "tiny", "rate_mbit": 200.0, "rate_then_mbit": 50.0, "num_steps": 640}
    seconds = {"before_s": 1.0, "slow_s": 3.0, "after_s": 2.0, "fresh_s": 1.9}
    notes = {"notes": ["all DP won the race of 3 plans"], "fresh_notes": []}
    row = {"case": case, **seconds, **notes, "steps_until": 120}
    found = [(round(each.measured, 2), each.is_met) for each in targets([row])]
    assert found == [(120, True), (1.05, False), (0.67, True)]
    none = {"steps_until": None, "after_s": None, "fresh_s": None}
    assert [each.is_met for each in targets([{**row, **none}])] == [False]
    cells = [[*column.cells] for column in table([row, {**row, **none}]).columns]
    assert cells[1] == ["200 to 50 Mbit/s"] * 2
    assert cells[2] == ["all DP"] * 2
    assert cells[-1] == ["120", "never"]
