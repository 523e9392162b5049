"""The benchmark of accumulation at its smallest."""

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
