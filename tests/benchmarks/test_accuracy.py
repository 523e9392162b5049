"""The benchmark at a small size: two cases of every family, and what it makes of rows."""

import dataclasses
import json

import pytest

from benchmarks import accuracy
from benchmarks.families import FAMILIES
from benchmarks.measures.accuracy import fits, gloo, memory, peaks, planning
from benchmarks.measures.section import Results, Section
from benchmarks.testbed.memory import PHASES


def cheap_cases(family, count):
    """The first drawn cases with one small micro-batch, with split operators and without in turns."""
    drawn = memory.draw_cases(family, 40)
    cheap = [case for case in drawn if case.num_micro_batches == 1 and case.micro_batch_size < 8]
    split, whole = ([case for case in cheap if (case.most_slices > 1) == is_split] for is_split in (True, False))
    return [case for pair in zip(split, whole, strict=False) for case in pair][:count]


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_peaks_are_those_counted(family):
    cases = cheap_cases(family, 2)
    assert len({(case.world_size, case.precision, case.optimizer, case.backward_prefetch) for case in cases}) == 2
    for case in cases:
        found = memory.measure(case)
        assert -peaks.TOO_LOW <= found["error"] <= peaks.TOO_HIGH, case
        assert found["predicted"].keys() == found["counted"].keys() == set(PHASES)


@pytest.mark.distributed
def test_predicted_peaks_are_those_counted_on_each_rank_of_gloo():
    (case,) = cheap_cases("odd_mlp", 1)
    found = gloo.measure(dataclasses.replace(case, world_size=2))
    assert [-peaks.TOO_LOW <= rank["error"] <= peaks.TOO_HIGH for rank in found["ranks"]] == [True, True]
    assert found["counted"] == {phase: max(rank["counted"][phase] for rank in found["ranks"]) for phase in PHASES}


def test_the_benchmark_writes_what_it_prints_and_measures_no_case_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "FAMILIES", ["odd_mlp"])
    run = {"sections": ["memory"], "output": tmp_path / "results.json", "pictures": None, "num_cases": 1}
    accuracy.main(**run)
    printed = capsys.readouterr().out
    assert "memory 1 of 1: Case(family='odd_mlp'" in printed
    assert "predicted too high by: " in printed
    assert "MISSED" not in printed
    (row,) = json.loads(run["output"].read_text())["memory"]["rows"]
    assert row["case"]["family"] == "odd_mlp"
    monkeypatch.setattr(memory, "measure", None)
    accuracy.main(**run)
    assert printed.partition("\n")[2] == capsys.readouterr().out
    with pytest.raises(TypeError, match="not callable"):
        accuracy.main(**run, fresh=True)


@dataclasses.dataclass(frozen=True)
class Number:
    value: int


def squares(numbers, measure):
    return Section(
        name="squares", cases=[Number(n) for n in numbers], measure=measure, table=None, targets=None, misses=None
    )


def test_a_run_that_was_killed_goes_on_and_other_sections_stay(tmp_path):
    path = tmp_path / "results.json"
    path.write_text('{"other": {"date": "2026-01-01", "machine": "abacus", "rows": [{"case": 1}]}}')
    measured = []

    def square(case):
        measured.append(case.value)
        if measured == [1, 2]:
            raise KeyboardInterrupt
        return {"square": case.value**2}

    with pytest.raises(KeyboardInterrupt):
        Results(path).rows(squares([1, 2, 3], square), print)
    rows = Results(path).rows(squares([1, 2, 3], square), print)
    assert measured == [1, 2, 2, 3]
    assert rows == [{"case": {"value": n}, "square": n * n} for n in (1, 2, 3)]
    assert Results(path).stored("squares") == rows
    assert Results(path).stored("other") == [{"case": 1}]
    # what is no longer asked for goes
    assert Results(path).rows(squares([3], square), print) == Results(path).stored("squares") == rows[2:]
    assert json.loads(path.read_text())["other"]["machine"] == "abacus"


def row(error, **case):
    peak = round(1_000_000 * (1 + error))
    return {
        "case": {"family": "tied", **case},
        "predicted": {"forward": peak, "backward": 110},
        "counted": {"forward": 1_000_000, "backward": 100},
        "error": error,
    }


def test_targets_take_the_worst_row_in_either_direction():
    rows = [row(0.015), row(-0.02), row(0.0)]
    high, low = peaks.targets(rows, "memory")
    assert (high.measured, high.is_met) == (0.015, True)
    assert (low.measured, low.is_met) == (0.02, False)
    assert str(low) == "memory: predicted too low by: 0.02, target below 0.01: MISSED"


def test_a_miss_is_told_with_its_phases():
    rows = [row(0.019, seed=1), row(0.03, seed=2)]
    assert peaks.misses(rows) == ["+3.00%: family tied, seed 2: forward +3.00%, backward +10.00%"]


def test_fits_names_what_was_decided_wrongly():
    lived, died = {"lived": True, "reason": ""}, {"lived": False, "reason": "no memory"}
    rows = [
        {"case": {"seed": 1}, "predicted_bytes": 1, "above": lived, "below": died},
        {"case": {"seed": 2}, "predicted_bytes": 1, "above": died, "below": lived},
    ]
    assert fits.misses(rows) == ["died 5% above: seed 2: no memory", "lived 5% below: seed 2"]
    assert [target.is_met for target in fits.targets(rows)] == [False]
    assert [target.is_met for target in fits.targets(rows[:1])] == [True]


def test_planning_compares_the_fastest_runs(monkeypatch):
    monkeypatch.setattr(planning, "HIDDEN_SIZE", 64)
    measured = planning.plan_once(2)
    assert measured["num_units"] > 2
    assert measured["profile_s"] > 0 < measured["plan_s"]
    rows = [
        {**measured, "case": {"num_layers": layers}, "profile_s": seconds, "plan_s": 1.0, "peak_rss_bytes": 2e9}
        for layers, seconds in [(48, 9.0), (96, 99.0), (48, 19.0), (96, 10.5)]
    ]
    assert [(target.measured, target.is_met) for target in planning.targets(rows)] == [
        (10.0, True),
        (2e9, True),
        (pytest.approx(0.15), False),
        (0.0, True),
        (0.0, True),
    ]


def test_pictures_are_the_same_each_time(tmp_path, monkeypatch):
    from benchmarks.pictures import memory as pictures

    _, case = cheap_cases("odd_mlp", 2)
    monkeypatch.setattr(pictures, "SHOWN", case)
    for name in ("first", "second"):
        pictures.draw_peaks({"alone": [row(0.01), row(0.02)], "real ranks": [row(0.0)]}, tmp_path / f"{name}.svg")
        pictures.draw_step(tmp_path / f"{name}_step.svg")
    for name in ("", "_step"):
        first, second = ((tmp_path / f"{each}{name}.svg").read_text() for each in ("first", "second"))
        assert first == second
        assert "<path" in first
