"""``fully_shard`` by hand, Lightning's strategies and OSDP with the same units, at their smallest."""

import json

import pytest

from benchmarks import engines
from benchmarks.measures.beside_fsdp.engines import peaks_targets
from benchmarks.testbed.beside_fsdp import engines as engines_testbed


@pytest.mark.distributed
@pytest.mark.slow
def test_engines_runs_all_that_take_part(tmp_path, capsys):
    output = tmp_path / "results.json"
    engines.main(output=output, quick=True)
    results = json.loads(output.read_text())
    for row in results["times"]["rows"]:
        assert tuple(row["seconds"]) == engines_testbed.CONTESTANTS
        assert all(second > 0 for seconds in row["seconds"].values() for second in seconds)
    for row in results["peaks"]["rows"]:
        assert tuple(row["bytes"]) == engines_testbed.CONTESTANTS
        assert row["bytes"][engines_testbed.BY_HAND] > 0
    assert all(target.is_met for target in peaks_targets(results["peaks"]["rows"]))
    for row in results["breakdown"]["rows"]:
        assert sum(row["wall_s"].values()) <= 2 * row["wall_s"]["whole step"]  # parts do not overlap
        assert min(row["wall_s"].values()) > 0
    printed = capsys.readouterr().out.splitlines()
    engines.main(output=output, quick=True)
    assert capsys.readouterr().out.splitlines() == [line for line in printed if ": Case(" not in line]
