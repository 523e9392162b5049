"""The benchmark of blocks that recompute at its smallest."""

import json

import pytest

from benchmarks import activations
from benchmarks.measures.beside_fsdp.contest import BEYOND_LIMIT
from benchmarks.measures.beside_fsdp.recompute import SHARE, of, targets
from benchmarks.testbed.beside_fsdp.recompute import BY_BLOCK, EVERYWHERE, FSDP, PAPERS_FSDP


@pytest.mark.distributed
def test_the_benchmark_compares_four_ways_to_fit(tmp_path):
    output = tmp_path / "results.json"
    activations.main(output=output, num_rounds=1, quick=True)
    (row,) = json.loads(output.read_text())["recompute"]["rows"]
    assert [each["name"] for each in row["entrants"]] == [FSDP, PAPERS_FSDP, EVERYWHERE, BY_BLOCK]
    for each in row["entrants"]:
        assert each["measured_s"] > 0
        assert each["predicted_bytes"] == pytest.approx(each["counted_bytes"], rel=5e-3)
    for name in (EVERYWHERE, BY_BLOCK):
        assert of(row, name)["counted_bytes"] <= SHARE * row["needed_bytes"] * BEYOND_LIMIT
    assert "3 blocks recompute" in of(row, EVERYWHERE)["plan"]
    assert all(target.is_met for target in targets([row]))
