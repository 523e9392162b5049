"""The simulated cluster at its smallest, and what is made of rows."""

import dataclasses
import json

import pytest

from benchmarks import cluster
from benchmarks.measures.simulated import predictions, tables
from benchmarks.measures.simulated.cluster import Case, profiled, targets
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


@pytest.mark.parametrize("machine", [TITANS, NODE], ids=["float32", "bf16-mixed"])
def test_the_largest_micro_batch_that_fits_is_the_best(machine):
    module = MODEL.on_meta()
    profile = profiled(module, machine)
    plan = Way(sharding="FULL_SHARD", recomputes=True).plan(module, world_size=8, micro_batch_size=1)

    def at(size):
        return simulate(dataclasses.replace(plan, micro_batch_size=size), profile, machine.cluster)

    limit_bytes = at(12).peak.peak_bytes
    chosen = largest_that_fits(plan, profile, machine.cluster, limit_bytes=limit_bytes)
    assert chosen.micro_batch_size == 12
    speeds = [size / at(size).time_s for size in (1, 2, 5, 11, 12)]
    assert speeds == sorted(speeds)
    assert largest_that_fits(plan, profile, machine.cluster, limit_bytes=at(1).peak.peak_bytes - 1) is None


def test_a_model_has_the_widths_that_its_layers_say():
    assert MODEL.widths == [32, 32, 64]
    module = MODEL.on_meta()
    assert [type(child).__name__ for child in module.blocks] == ["Block", "Block", "Linear", "Block"]
    assert all(parameter.is_meta for parameter in module.parameters())


def row_of(speeds, *, exposed_s=0.0):
    case = Case(machine=TITANS, model=MODEL, limit_gib=8.0)
    entrants = [
        {"name": name, "samples_per_s": speed, "predicted_s": 1.0, "exposed_s": exposed_s, "micro_batch_size": 3}
        for name, speed in speeds.items()
    ]
    return {"case": dataclasses.asdict(case), "entrants": entrants}


def test_it_is_said_where_nothing_is_gained_and_who_does_not_fit():
    by_block, by_linear, checkpointed = FSDP[0], FSDP[1], FSDP[3]
    nothing = row_of({by_block: 10.0, checkpointed: 11.0, OSDP[0]: 10.5, OSDP[2]: 11.1}, exposed_s=0.25)
    alone = row_of({OSDP[1]: 5.0})
    gains = row_of({by_linear: 10.0, OSDP[0]: 15.0})
    (first, second) = tables.remarks([nothing, alone, gains])
    assert "gains nothing (1.009 of FULL_SHARD, a unit for each block, checkpointed" in first
    assert "in 25.0% of its step" in first
    assert "no FSDP fits; OSDP, splitting trains" in second
    assert tables.over(gains, OSDP[0], by_block) is None
    assert tables.over(gains, OSDP[0], by_linear) == 1.5
    # with activations it may do all that FSDP may: to take part no more is a miss
    assert [tables.over_best(gains, name) for name in OSDP] == [1.5, 0.0, 0.0]
    assert tables.over_best(alone, OSDP[1]) is None
    (by_best,) = [[*column.cells] for column in tables.ratios([alone, gains]).columns[-1:]]
    assert by_best == ["does not fit", "rival does not fit", "does not fit", "1.50x", "does not fit", "does not fit"]


def test_errors_are_those_of_all_that_was_measured(tmp_path):
    entrants = [
        {"predicted_s": 1.1, "measured_s": 1.0, "predicted_bytes": 99, "counted_bytes": 100},
        {"predicted_s": 0.7, "measured_s": 1.0},
        {"predicted_s": 3.0, "measured_s": 0.0},
    ]
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"one": {"rows": [{"entrants": entrants}]}, "other": {"rows": [{"counted_bytes": 1}]}}))
    seconds, peaks = predictions.errors(path)
    assert seconds == pytest.approx([0.1, 0.3])
    assert peaks == pytest.approx([0.01])
    drawn = predictions.table([path, tmp_path / "missing.json"])
    assert [*drawn.columns[1].cells] == ["20.0% / 30.0% (2)", "not measured yet", "20.0% / 30.0% (2)"]
