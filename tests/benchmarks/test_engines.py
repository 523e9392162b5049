"""The benchmark of engines at its smallest."""

import json

import pytest

from benchmarks import engines
from benchmarks.measures.beside_fsdp.engines import peaks_targets
from benchmarks.testbed.beside_fsdp.engines import BY_HAND, CONTESTANTS


@pytest.mark.distributed
def test_the_benchmark_runs_all_that_take_part(tmp_path, capsys):
    output = tmp_path / "results.json"
    engines.main(output=output, quick=True)
    results = json.loads(output.read_text())
    for row in results["times"]["rows"]:
        assert tuple(row["seconds"]) == CONTESTANTS
        assert all(second > 0 for seconds in row["seconds"].values() for second in seconds)
    for row in results["peaks"]["rows"]:
        assert tuple(row["bytes"]) == CONTESTANTS
        assert row["bytes"][BY_HAND] > 0
    assert all(target.is_met for target in peaks_targets(results["peaks"]["rows"]))
    for row in results["breakdown"]["rows"]:
        assert sum(row["wall_s"].values()) <= 2 * row["wall_s"]["whole step"]  # parts do not overlap
        assert min(row["wall_s"].values()) > 0
    printed = capsys.readouterr().out.splitlines()
    engines.main(output=output, quick=True)
    assert capsys.readouterr().out.splitlines() == [line for line in printed if ": Case(" not in line]
