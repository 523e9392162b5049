"""The benchmark of accumulation at its smallest, what it is compared with, and what it makes of rows."""

import json

import pytest

from benchmarks import accumulation
from benchmarks.measures.accumulation import full_shard_of, targets
from benchmarks.testbed.contest import build
from benchmarks.testbed.groups import fake_group, simulated_group
from benchmarks.testbed.lightning_fsdp import LightningFSDP, LightningStep, lightning_plan
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.simulated import SimulatedLinks
from lightning_osdp.callbacks.peak import living_tensors
from lightning_osdp.profiler import LiveBytes

SIZES = {"world_size": 2, "micro_batch_size": 2, "num_micro_batches": 3}


def model_and_plan(sharding):
    module = build("gpt_tiny")
    return module, lightning_plan(module, sharding, **SIZES)


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_step_of_lightnings_fsdp_takes_what_its_trainer_takes(sharding):
    with fake_group(2):
        trained = count_step(*model_and_plan(sharding), strategy=LightningFSDP(sharding))
        step = LightningStep(*model_and_plan(sharding), sharding)
        step()
        live = LiveBytes("cpu")
        live.track([*living_tensors(step.root, [step.optimizer]), *step.batch])
        with live:
            step()
    assert live.peak_bytes == pytest.approx(trained.peak_bytes, abs=100)  # losses


@pytest.mark.parametrize(("sharding", "gathers"), [("FULL_SHARD", 3 * (2 * 2 + 1)), ("SHARD_GRAD_OP", 3)])
def test_lightnings_fsdp_reduces_once_and_gathers_as_its_sharding_says(sharding, gathers):
    # of two blocks and the root, which is freed after backward only
    links = SimulatedLinks(all_gather_s=lambda _: 1e-3, reduce_scatter_s=lambda _: 1e-6)
    with simulated_group(2, links) as group:
        step = LightningStep(*model_and_plan(sharding), sharding)
        step()
        assert group.simulated_s == pytest.approx(gathers * 1e-3 + 3 * 1e-6)


@pytest.mark.distributed
def test_the_benchmark_compares_all_that_fit_and_counts_what_was_planned(tmp_path, capsys):
    output = tmp_path / "results.json"
    run = {"sections": ["held"], "output": output, "num_rounds": 1, "quick": True}
    accumulation.main(**run)
    results = json.loads(output.read_text())
    assert len(results["baselines"]["rows"]) == 4
    (row,) = results["held"]["rows"]
    for limit in (1.0, 1.15, None):
        assert full_shard_of(row, limit)["measured_s"] > 0
    for each in row["entrants"]:
        assert each["predicted_bytes"] == pytest.approx(each["counted_bytes"], rel=1e-3)
        assert (each["micro_batch_size"], each["num_micro_batches"]) == (1, 2)
    assert [target.is_met for target in targets([row])] == [True, True]  # those of memory
    printed = capsys.readouterr().out.splitlines()
    accumulation.main(**run)
    assert capsys.readouterr().out.splitlines() == [line for line in printed if ": Case(" not in line]


def entrant(name, limit, measured_s):
    return {"name": name, "limit": limit, "measured_s": measured_s, "counted_bytes": 100}


def test_targets_are_those_of_the_rate_and_of_the_better_baseline_that_fits():
    row = {
        "case": {"rate_mbit": 200.0, "is_auto": False},
        "full_shard_bytes": 100,
        "entrants": [
            entrant("FULL_SHARD", 1.0, 20.0),
            entrant("OSDP", 1.0, 16.0),
            entrant("FULL_SHARD", None, 20.0),
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
    assert str(targets([row])[3]) == "200 Mbit/s, held, unlimited: over FULL_SHARD: 2.5, target at least 2.9: MISSED"
    fast = {**row, "case": {"rate_mbit": 1000.0, "is_auto": False}}
    assert [target.limit for target in targets([fast])] == [1.001, 0.97, 0.97]
