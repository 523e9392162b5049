"""The simulated cluster at its smallest."""

import dataclasses
import json

import pytest

from benchmarks import cluster
from benchmarks.measures.simulated import nodes
from benchmarks.measures.simulated.cluster import profiled, targets
from benchmarks.measures.simulated.machines import TITANS, Model, Place
from benchmarks.measures.simulated.tables import FSDP, OSDP
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Way
from benchmarks.testbed.plans import largest_that_fits
from lightning_osdp import simulate

MODEL = Model(family="usual", layers="2 x 32 + 1 x 64", sequence_length=16, vocabulary_size=32)


@pytest.mark.slow
def test_everybody_takes_part_within_the_limit(tmp_path, capsys):
    output = tmp_path / "results.json"
    cluster.main(output=output, quick=True)
    written = json.loads(output.read_text())
    (row,) = written["papers"]["rows"]
    (case,) = cluster.quick_cases()
    assert {each["name"] for each in row["entrants"]} == {*FSDP, *OSDP}
    for each in row["entrants"]:
        parts = each["compute_s"] + each["exposed_s"] + each["overhead_s"]
        assert parts == pytest.approx(each["predicted_s"])
        assert each["predicted_bytes"] <= case.limit_gib * 2**30
    assert all(target.is_met for target in targets([row]))
    (row,) = written["nodes"]["rows"]
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
    printed = capsys.readouterr().out
    assert "paper, measured" in printed
    assert "activations.json" in printed


NODE = Place(name="8 H100, NVLink", spec="8 h100-sxm", precision="bf16-mixed")


@pytest.mark.slow
@pytest.mark.parametrize("place", [TITANS, NODE], ids=["float32", "bf16-mixed"])
def test_the_largest_micro_batch_that_fits_is_the_best(place):
    module = MODEL.on_meta()
    profile = profiled(module, place)
    plan = Way(sharding="FULL_SHARD", recomputes=True).plan(module, world_size=8, micro_batch_size=1)

    def at(size):
        return simulate(dataclasses.replace(plan, micro_batch_size=size), profile, place.machine.cluster)

    limit_bytes = at(12).peak.peak_bytes
    chosen = largest_that_fits(plan, profile, place.machine.cluster, limit_bytes=limit_bytes)
    assert chosen.micro_batch_size == 12
    speeds = [size / at(size).time_s for size in (1, 2, 5, 11, 12)]
    assert speeds == sorted(speeds)
    assert largest_that_fits(plan, profile, place.machine.cluster, limit_bytes=at(1).peak.peak_bytes - 1) is None
