"""The simulated cluster at its smallest."""

import dataclasses
import json

import pytest

from benchmarks import cluster
from benchmarks.measures.simulated.cluster import profiled, targets
from benchmarks.measures.simulated.machines import NODE, TITANS, Model
from benchmarks.measures.simulated.tables import FSDP, OSDP
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Way
from benchmarks.testbed.plans import largest_that_fits
from lightning_osdp import simulate

MODEL = Model(family="usual", layers="2 x 32 + 1 x 64", sequence_length=16, vocabulary_size=32)


def test_everybody_takes_part_within_the_limit(tmp_path, capsys):
    output = tmp_path / "results.json"
    cluster.main(output=output, quick=True)
    (row,) = json.loads(output.read_text())["cluster"]["rows"]
    (case,) = cluster.quick_cases()
    assert {each["name"] for each in row["entrants"]} == {*FSDP, *OSDP}
    for each in row["entrants"]:
        parts = each["compute_s"] + each["exposed_s"] + each["overhead_s"]
        assert parts == pytest.approx(each["predicted_s"])
        assert each["predicted_bytes"] <= case.limit_gib * 2**30
    assert all(target.is_met for target in targets([row]))
    printed = capsys.readouterr().out
    assert "paper, measured" in printed
    assert "activations.json" in printed


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
