"""The simulated cluster at its smallest."""

import dataclasses
import json

import pytest

from benchmarks import cluster
from benchmarks.families import build
from benchmarks.measures.simulated import nodes
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Way
from benchmarks.testbed.plans import largest_that_fits
from lightning_osdp import Machine, profile_model, simulate


@pytest.mark.slow
def test_everybody_takes_part_within_the_limit(tmp_path, capsys):
    output = tmp_path / "results.json"
    cluster.main(output=output, quick=True)
    (row,) = json.loads(output.read_text())["nodes"]["rows"]
    assert {each["name"].partition(",")[0] for each in row["by_hand"]} == {
        "FULL_SHARD",
        "SHARD_GRAD_OP",
        "HYBRID_SHARD",
        "HYBRID_SHARD_ZERO2",
    }
    assert {*row["plans"]} == {*nodes.SPACES}
    for each in (*row["by_hand"], *row["plans"].values()):
        assert each["micro_batch_size"] * each["num_micro_batches"] * 4 == row["case"]["global_batch"]
        assert each["peak_bytes"] <= row["limit_bytes"]
    assert all(target.is_met for target in nodes.targets([row]))
    assert "activations.json" in capsys.readouterr().out


@pytest.mark.slow
def test_the_largest_micro_batch_that_fits_is_the_best():
    module, machine = build("tiny"), Machine.parse("8 h100-sxm")
    profile = profile_model(module, module.batch(4), rates=machine.rates, activations=("keep", "recompute"))
    plan = Way(sharding="FULL_SHARD", recomputes=True).plan(module, world_size=8, micro_batch_size=1)

    def at(size):
        return simulate(dataclasses.replace(plan, micro_batch_size=size), profile, machine.cluster)

    limit_bytes = at(12).peak.peak_bytes
    chosen = largest_that_fits(plan, profile, machine.cluster, limit_bytes=limit_bytes)
    assert chosen.micro_batch_size == 12
    speeds = [size / at(size).time_s for size in (1, 2, 5, 11, 12)]
    assert speeds == sorted(speeds)
    assert largest_that_fits(plan, profile, machine.cluster, limit_bytes=at(1).peak.peak_bytes - 1) is None
