"""The benchmark of accumulation at its smallest, and what it makes of rows."""

import json

import pytest

from benchmarks import accumulation
from benchmarks.measures.beside_fsdp.accumulation import targets
from benchmarks.measures.beside_fsdp.baselines import BASE, FULL_SHARD, KEPT, SHARD_GRAD_OP
from benchmarks.measures.beside_fsdp.contest import named


@pytest.mark.distributed
def test_the_benchmark_compares_all_that_fit_and_counts_what_was_planned(tmp_path, capsys):
    output = tmp_path / "results.json"
    run = {"sections": ["held"], "output": output, "num_rounds": 1, "quick": True}
    accumulation.main(**run)
    results = json.loads(output.read_text())
    assert [len(row["peaks"]) for row in results["baselines, tiny"]["rows"]] == [2, 2, 2, 2]
    (row,) = results["held"]["rows"]
    for limit in (1.0, 1.15, None):
        assert named(row, BASE.name, limit)["measured_s"] > 0
    for way in (BASE, KEPT, FULL_SHARD, SHARD_GRAD_OP):
        assert named(row, way.name, None)["measured_s"] > 0
    for each in row["entrants"]:
        assert each["predicted_bytes"] == pytest.approx(each["counted_bytes"], rel=1e-3)
        assert (each["micro_batch_size"], each["num_micro_batches"]) == (1, 2)
    assert [target.is_met for target in targets([row])] == [True, True]  # those of memory
    printed = capsys.readouterr().out.splitlines()
    accumulation.main(**run)
    assert capsys.readouterr().out.splitlines() == [line for line in printed if ": Case(" not in line]


def entrant(name, limit, measured_s):
    sizes = {"micro_batch_size": 2, "num_micro_batches": 4}
    return {"name": name, "limit": limit, "measured_s": measured_s, "counted_bytes": 100, **sizes}


def test_targets_are_those_of_the_rate_and_of_the_better_baseline_that_fits():
    row = {
        "case": {"rate_mbit": 200.0, "division": "held"},
        "base_bytes": 100,
        "entrants": [
            entrant(BASE.name, 1.0, 20.0),
            entrant("OSDP", 1.0, 16.0),
            entrant(BASE.name, None, 20.0),
            entrant("SHARD_GRAD_OP", None, 5.0),
            entrant("OSDP", None, 8.0),
        ],
    }
    assert [(target.measured, target.limit, target.is_met) for target in targets([row])] == [
        (1.0, 1.001, True),
        (1.25, 1.15, True),
        (1.25, 0.97, True),
        (2.5, 2.9, False),
        (0.625, 0.97, False),
    ]
    assert str(targets([row])[3]) == (
        "200 Mbit/s, held, unlimited: over fully_shard FULL_SHARD: 2.5, target at least 2.9: MISSED"
    )
    fast = {**row, "case": {"rate_mbit": 1000.0, "division": "held"}}
    assert [target.limit for target in targets([fast])] == [1.001, 0.97, 0.97]
