"""The benchmark of predictions at a small size: two cases of every family."""

import dataclasses
import json

import pytest

from benchmarks import accuracy
from benchmarks.families import FAMILIES
from benchmarks.measures.accuracy import collectives, gloo, memory, peaks, planning
from benchmarks.measures.section import Results, Section
from benchmarks.testbed.memory import PHASES
from tests.support.tiers import slow


def cheap_cases(family, count):
    """The first drawn cases with one small micro-batch, with split operators and without in turns."""
    drawn = memory.draw_cases(family, 40)
    cheap = [case for case in drawn if case.num_micro_batches == 1 and case.micro_batch_size < 8]
    split, whole = ([case for case in cheap if (case.most_slices > 1) == is_split] for is_split in (True, False))
    return [case for pair in zip(split, whole, strict=False) for case in pair][:count]


@pytest.mark.parametrize(
    "family",
    [each if each == "odd_mlp" else slow(each) for each in FAMILIES],
)
def test_predicted_peaks_are_those_counted(family):
    cases = cheap_cases(family, 2)
    assert len({(case.world_size, case.precision, case.optimizer, case.backward_prefetch) for case in cases}) == 2
    drawn = (dataclasses.replace(cases[0], activations="levels", seed=seed) for seed in range(4))
    at_levels = next((case for case in drawn if any(block.kept for block in memory.predict(case)[1].blocks)), None)
    assert (at_levels is None) is (family == "odd_mlp")
    for case in filter(None, (*cases, at_levels)):
        found = memory.measure(case)
        assert -peaks.TOO_LOW <= found["error"] <= peaks.TOO_HIGH, case
        assert found["predicted"].keys() == found["counted"].keys() == set(PHASES)


@pytest.mark.slow
@pytest.mark.distributed
def test_predicted_peaks_are_those_counted_on_each_rank_of_gloo():
    (case,) = cheap_cases("odd_mlp", 1)
    found = gloo.measure(dataclasses.replace(case, world_size=2))
    assert [-peaks.TOO_LOW <= rank["error"] <= peaks.TOO_HIGH for rank in found["ranks"]] == [True, True]
    assert found["counted"] == {phase: max(rank["counted"][phase] for rank in found["ranks"]) for phase in PHASES}


def test_the_benchmark_writes_what_it_prints_and_measures_no_case_twice(tmp_path, monkeypatch, capsys):
    from benchmarks.pictures import memory as pictures

    monkeypatch.setattr(memory, "FAMILIES", ["odd_mlp"])
    monkeypatch.setattr(pictures, "SHOWN", cheap_cases("odd_mlp", 2)[1])
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
    accuracy.main(**{**run, "sections": [], "pictures": tmp_path})
    for name in ("accuracy_memory", "memory_over_step"):
        assert "<path" in (tmp_path / f"{name}.svg").read_text()


@pytest.mark.slow
def test_planning_is_measured(monkeypatch):
    monkeypatch.setattr(planning, "HIDDEN_SIZE", 64)
    measured = planning.plan_once(2)
    assert measured["num_units"] > 2
    assert measured["profile_s"] > 0 < measured["plan_s"]


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
    # rows that are no longer asked for go
    assert Results(path).rows(squares([3], square), print) == Results(path).stored("squares") == rows[2:]
    assert json.loads(path.read_text())["other"]["machine"] == "abacus"


@pytest.mark.slow
def test_collectives_are_timed_beside_those_of_gloo():
    case = collectives.Case(num_ranks=2, rate_mbit=None, num_rounds=1)
    found = collectives.measure(case)
    names = {"all-to-all of gloo", "all-to-all", "all-gather of gloo", "all-gather"}
    assert [int(size) for size in found["seconds"]] == [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
    for seconds in found["seconds"].values():
        assert seconds.keys() == names
        assert min(seconds.values()) >= 0
    drawn = collectives.table([{"case": dataclasses.asdict(case), **found}])
    assert drawn.row_count == 5
