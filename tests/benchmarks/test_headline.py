"""The headline's benchmark at its smallest, and what it makes of rows."""

import json
from pathlib import Path

import pytest

from benchmarks import headline
from benchmarks.families import build
from benchmarks.measures.beside_fsdp.baselines import BASE, FULL_SHARD
from benchmarks.measures.beside_fsdp.contest import named, ratio
from benchmarks.measures.beside_fsdp.headline import (
    CHECKPOINTING,
    GLOBAL_SPACES,
    ONE_SPACES,
    WAYS,
    targets_of_global,
    targets_of_one,
)
from benchmarks.testbed.plans import simulated
from lightning_osdp import Cluster, make_plan, profile_model
from lightning_osdp.core.cluster import UNIT_PARTS, Link, UnitOverhead

NAMES = [way.name for way in (BASE, CHECKPOINTING, FULL_SHARD)]


@pytest.fixture(scope="module")
def tiny_profile():
    return profile_model(build("tiny"), build("tiny").batch(2), activations=("keep", "recompute"))


@pytest.mark.parametrize("num_samples", [1, 6])
@pytest.mark.parametrize("way", [way for way in WAYS if way.is_fully_shard], ids=lambda way: way.name)
def test_no_way_of_fully_shard_is_predicted_to_be_faster_than_a_plan_in_its_memory(tiny_profile, way, num_samples):
    link = Link(latency_s=1e-3, seconds_per_byte=1e-8)
    overhead = dict.fromkeys(UNIT_PARTS, UnitOverhead(fixed_s=2e-3))
    cluster = Cluster(world_size=4, all_gather=link, reduce_scatter=link, unit_overhead=overhead)
    plan = way.plan(build("tiny"), world_size=4, micro_batch_size=num_samples)
    other = simulated(plan, tiny_profile, cluster, engine=way.engine)
    limit_bytes = other.peak.peak_bytes
    plan = make_plan(tiny_profile, cluster, memory_limit_bytes=limit_bytes, micro_batch_size=num_samples)
    assert plan.step_time_s <= other.time_s * 1.001


@pytest.mark.distributed
def test_the_benchmark_compares_all_that_fit_at_their_best(tmp_path: Path):
    output = tmp_path / "results.json"
    headline.main(["one", "global"], output=output, num_rounds=1, quick=True)
    results = json.loads(output.read_text())
    assert len(results["baselines, tiny"]["rows"]) == len(headline.QUICK.ways)
    for name, spaces, targets in (
        ("one", ONE_SPACES, targets_of_one),
        ("global", GLOBAL_SPACES, targets_of_global),
    ):
        (row,) = results[name]["rows"]
        for limit in row["case"]["limits"]:
            assert all(named(row, each, limit) for each in (*NAMES, *spaces))
        for entrant in row["entrants"]:
            assert entrant["measured_s"] > 0
            assert entrant["counted_bytes"] <= entrant["limit"] * row["base_bytes"] * 1.001
            if entrant["name"] != "DDP":
                assert entrant["predicted_bytes"] == pytest.approx(entrant["counted_bytes"], rel=5e-3)
                assert ratio(row, entrant, "predicted_s") > 0
            if name == "global":
                assert entrant["micro_batch_size"] * entrant["num_micro_batches"] == 2
        assert all(target.is_met for target in targets([row]))  # those of memory: links are not shaped
