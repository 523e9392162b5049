"""The benchmarks beside FSDP at their smallest, and that its ways are predicted to be no faster than plans."""

import json
from pathlib import Path

import pytest

from benchmarks import accumulation, activations, engines, headline
from benchmarks.families import build
from benchmarks.measures.beside_fsdp.accumulation import targets as accumulation_targets
from benchmarks.measures.beside_fsdp.baselines import BASE, FULL_SHARD, KEPT, SHARD_GRAD_OP
from benchmarks.measures.beside_fsdp.contest import BEYOND_LIMIT, named, ratio
from benchmarks.measures.beside_fsdp.engines import peaks_targets
from benchmarks.measures.beside_fsdp.headline import (
    CHECKPOINTING,
    GLOBAL_SPACES,
    ONE_SPACES,
    WAYS,
    targets_of_global,
    targets_of_one,
)
from benchmarks.measures.beside_fsdp.recompute import SHARE, of
from benchmarks.measures.beside_fsdp.recompute import targets as recompute_targets
from benchmarks.testbed.beside_fsdp import engines as engines_testbed
from benchmarks.testbed.beside_fsdp.recompute import BY_BLOCK, EVERYWHERE, FSDP, PAPERS_FSDP
from lightning_osdp import Cluster, make_plan, profile_model, simulate
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
    other = simulate(plan, tiny_profile, cluster)
    limit_bytes = other.peak.peak_bytes
    plan = make_plan(tiny_profile, cluster, memory_limit_bytes=limit_bytes, micro_batch_size=num_samples)
    assert plan.step_time_s <= other.time_s * 1.001


@pytest.mark.distributed
@pytest.mark.slow
def test_headline_compares_all_that_fit_at_their_best(tmp_path: Path):
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
            if entrant["predicted_bytes"] is not None:
                assert entrant["predicted_bytes"] == pytest.approx(entrant["counted_bytes"], rel=5e-3)
                assert ratio(row, entrant, "predicted_s") > 0
            if name == "global":
                assert entrant["micro_batch_size"] * entrant["num_micro_batches"] == 2
        assert all(target.is_met for target in targets([row]))  # those of memory: links are not shaped


@pytest.mark.distributed
@pytest.mark.slow
def test_accumulation_compares_all_that_fit_and_counts_what_was_planned(tmp_path, capsys):
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
        if each["name"] not in {FULL_SHARD.name, SHARD_GRAD_OP.name}:
            assert each["predicted_bytes"] == pytest.approx(each["counted_bytes"], rel=1e-3)
        assert (each["micro_batch_size"], each["num_micro_batches"]) == (1, 2)
    assert [target.is_met for target in accumulation_targets([row])] == [True, True]  # those of memory
    printed = capsys.readouterr().out.splitlines()
    accumulation.main(**run)
    assert capsys.readouterr().out.splitlines() == [line for line in printed if ": Case(" not in line]


@pytest.mark.distributed
@pytest.mark.slow
def test_activations_compares_four_ways_to_fit(tmp_path):
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
    assert all(target.is_met for target in recompute_targets([row]))


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
