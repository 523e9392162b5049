"""Predicted beside published, at its smallest."""

import json

import pytest

from benchmarks import published
from benchmarks.measures.simulated.published import (
    Case,
    calibrated,
    cases,
    memory_errors,
    speed_errors,
    targets,
)


def row(predicted_gib, predicted_tokens_per_s, **fields):
    case = {
        "set": "A", "model": "m", "machine": "8 @", "sequence": 8, "batch": 1, "checkpointing": "none",
        "strategy": "fully_shard",
        "reshard": "default", "gib": None, "tokens_per_s": None, "does_not_fit": False, "calibrates": False, **fields,
    }  # fmt: skip
    return {
        "case": case,
        "predicted_gib": predicted_gib,
        "live_gib": predicted_gib,
        "predicted_tokens_per_s": predicted_tokens_per_s,
        "device_gib": 80.0,
    }


ROWS = [
    row(40.0, 8000.0, gib=50.0, tokens_per_s=4000, calibrates=True, reshard="always"),
    row(54.0, 8800.0, gib=60.0, tokens_per_s=4200, reshard="never"),
    row(90.0, 1.0, does_not_fit=True),
    row(81.0, 1.0, tokens_per_s=4000),
]


def test_throughput_is_calibrated_by_one_row_and_memory_is_not():
    assert calibrated(ROWS, ROWS[1]) == 4400.0
    assert speed_errors(ROWS[:2], ["A"]) == pytest.approx([4400 / 4200 - 1])
    assert memory_errors(ROWS) == pytest.approx([40 / 50 - 1, 54 / 60 - 1])
    assert memory_errors([*ROWS, row(60.0, 1.0, set="R2", gib=40.0, holds_less=True)]) == memory_errors(ROWS)
    unknown = [row(40.0, 1.0, set="C", gib=50.0, calibrates=True), row(54.0, 1.0, set="C", gib=60.0)]
    assert memory_errors(unknown) == pytest.approx([(14.0 - 10.0) / 60.0])


def test_targets_name_what_is_off():
    found = {target.name.rpartition(": ")[2]: target for target in targets(ROWS)}
    assert found["GiB off by"].measured == pytest.approx(0.4)
    assert found["tokens/s off by"].measured == pytest.approx(0.1 / 0.05 - 1)
    fits = [target for target in targets(ROWS) if "whether it fits" in target.name]
    assert [target.is_met for target in fits] == [True, True, True, False]  # 81 GiB do not fit in 80


def test_every_row_states_what_was_measured():
    for case in cases():
        assert isinstance(case, Case)
        assert case.gib or case.tokens_per_s or case.step_s or case.does_not_fit
    names = {case.set for case in cases()}
    timed = {case.set for case in cases() if case.tokens_per_s}
    assert timed < names
    assert all(sum(case.calibrates for case in cases() if case.set == name) == 1 for name in timed)


@pytest.mark.slow
def test_a_set_is_predicted_without_gpus(tmp_path, capsys):
    output = tmp_path / "results.json"
    published.main(output=output, quick=True)
    rows = json.loads(output.read_text())["published"]["rows"]
    assert [each["case"]["machine"] for each in rows] == ["8 @", "8x8 @, 8x400gbit"]
    # parameters and both moments are 12 bytes each, sharded over 8 or 64; gradients have a pool of their own beside
    difference = rows[0]["reserved_gib"] - rows[1]["reserved_gib"]
    assert difference * 2**30 == pytest.approx(16 * 8.03e9 * (1 / 8 - 1 / 64), rel=0.2)
    assert "memory" in capsys.readouterr().out
