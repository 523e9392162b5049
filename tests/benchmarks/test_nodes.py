"""The benchmark on nodes at its smallest, and the bytes that nodes send each other."""

import json
from dataclasses import replace

import pytest

from benchmarks import nodes
from benchmarks.families import build
from benchmarks.measures.beside_fsdp.contest import named, ratio
from benchmarks.measures.beside_fsdp.nodes import HYBRID, LIMITS, SPACES, WAYS, links_targets, targets
from benchmarks.testbed.namespaces import why_unavailable
from benchmarks.testbed.plans import sent_bytes

NAMES = {way.name: way for way in WAYS}


# of S bytes of all units, on two nodes of two ranks, with gradients reduced in the last of K micro-batches
@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FULL_SHARD", lambda number: 1.5 * number + 0.75),
        ("SHARD_GRAD_OP", lambda number: 1.5),  # no_sync keeps it gathered
        ("fully_shard FULL_SHARD", lambda number: 2.25 * number),
        ("hpZ", lambda number: 0.75 * number + 0.75),
        ("HYBRID_SHARD", lambda number: 1),
        ("HYBRID_SHARD_ZERO2", lambda number: 1),
        ("DDP", lambda number: 1.5),
    ],
)
def test_bytes_that_a_node_sends_have_closed_forms(name, expected, num_micro_batches):
    plan = NAMES[name].plan(
        build("tiny"), world_size=4, node_size=2, micro_batch_size=1, num_micro_batches=num_micro_batches
    )
    units = [replace(unit, parameter_bytes=100 * bool(unit.name)) for unit in plan.units]
    whole = sum(unit.parameter_bytes for unit in units)
    assert sent_bytes(replace(plan, units=tuple(units))) == pytest.approx(expected(num_micro_batches) * whole)


def test_units_that_accumulate_in_the_node_are_all_reduced_once():
    plan = HYBRID.plan(build("tiny"), world_size=4, node_size=2, micro_batch_size=1, num_micro_batches=4)
    units = [replace(unit, parameter_bytes=100, sync="node") for unit in plan.units]
    assert sent_bytes(replace(plan, units=tuple(units))) == pytest.approx(100 * len(units))
    every = [replace(unit, sync="every") for unit in units]
    assert sent_bytes(replace(plan, units=tuple(every))) == pytest.approx(400 * len(units))


@pytest.mark.distributed
@pytest.mark.slow
def test_nodes_send_each_other_what_they_should(tmp_path):
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    output = tmp_path / "results.json"
    nodes.main(["links", "bytes"], output=output, quick=True)
    results = json.loads(output.read_text())
    assert all(target.is_met for target in links_targets(results["links"]["rows"]))
    (row,) = results["bytes"]["rows"]
    assert len(row["entrants"]) == len(nodes.QUICK.ways)
    for each in row["entrants"]:  # little is sent: a good part of it is headers
        assert 1 <= each["sent_bytes"] / each["wire_bytes"] < 1.4


@pytest.mark.distributed
@pytest.mark.slow
def test_nodes_compares_all_that_fit_at_their_best(tmp_path):
    output = tmp_path / "results.json"
    nodes.main(["global"], output=output, num_rounds=1, quick=True)
    results = json.loads(output.read_text())
    assert len(results["baselines, tiny"]["rows"]) == len(nodes.QUICK.ways)
    (row,) = results["global"]["rows"]
    for limit in LIMITS:
        assert all(named(row, each, limit) for each in SPACES)
    for each in row["entrants"]:
        assert each["measured_s"] > 0
        assert each["counted_bytes"] <= each["limit"] * row["base_bytes"] * 1.001
        if each["predicted_bytes"] is not None:
            assert each["predicted_bytes"] == pytest.approx(each["counted_bytes"], rel=5e-3)
            assert ratio(row, each, "predicted_s") > 0
    assert all(target.is_met for target in targets([row]))  # those of memory: links are not shaped
