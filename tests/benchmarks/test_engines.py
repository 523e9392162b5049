"""The benchmark of engines at its smallest, and what it makes of rows."""

import json

import pytest

from benchmarks import engines
from benchmarks.measures.beside_fsdp.engines import FSDP1, breakdown_targets, peaks_targets, times_ratio, times_targets
from benchmarks.testbed.beside_fsdp.engines import BY_HAND, BY_HAND_ON_ROWS, CONTESTANTS, OSDP


@pytest.mark.distributed
def test_the_benchmark_runs_all_that_take_part(tmp_path, capsys):
    output = tmp_path / "results.json"
    engines.main(output=output, quick=True)
    results = json.loads(output.read_text())
    for row in results["times"]["rows"]:
        assert tuple(row["seconds"]) == CONTESTANTS
        assert all(second > 0 for seconds in row["seconds"].values() for second in seconds)
    for row in results["peaks"]["rows"]:
        assert tuple(row["bytes"]) == CONTESTANTS
        assert row["bytes"][BY_HAND] > 0
    assert all(target.is_met for target in peaks_targets(results["peaks"]["rows"]))
    for row in results["breakdown"]["rows"]:
        assert sum(row["wall_s"].values()) <= 2 * row["wall_s"]["whole step"]  # parts do not overlap
        assert min(row["wall_s"].values()) > 0
    printed = capsys.readouterr().out.splitlines()
    engines.main(output=output, quick=True)
    assert capsys.readouterr().out.splitlines() == [line for line in printed if ": Case(" not in line]


def row_of(rate_mbit, seconds):
    return {"case": {"model": "m", "mode": "ZDP", "rate_mbit": rate_mbit}, "seconds": seconds}


def test_steps_are_compared_with_those_of_the_same_round():
    assert times_ratio(row_of(200.0, {BY_HAND: [2.0, 4.0, 1.0], OSDP: [3.0, 6.0, 9.0]}), OSDP, BY_HAND) == 1.5


@pytest.mark.parametrize(("rate_mbit", "least"), [(200.0, 0.97), (1000.0, 0.95), (None, None)])
def test_targets_are_those_of_the_rate(rate_mbit, least):
    row = row_of(rate_mbit, {BY_HAND: [1.0], BY_HAND_ON_ROWS: [0.99], FSDP1: [0.96], OSDP: [1.0]})
    *speeds, by_hand, on_rows = times_targets([row])
    assert [(target.limit, target.measured, target.is_least) for target in speeds] == (
        [] if least is None else [(least, 0.96, True)]
    )
    assert (by_hand.is_met, on_rows.is_met) == (True, True)
    del row["seconds"][FSDP1]  # which is measured no more
    assert [target.measured for target in times_targets([row])] == [by_hand.measured, on_rows.measured]


def test_peaks_are_compared_in_units():
    # the largest unit is a block of "tiny": 12 * 32^2 weights, and biases and norms of 13 * 32
    unit_bytes = 4 * (12 * 32**2 + 13 * 32)
    row = {"case": {"model": "tiny", "mode": "ZDP"}, "bytes": {BY_HAND: unit_bytes, OSDP: 2 * unit_bytes}}
    assert [target.measured for target in peaks_targets([row])] == [1.0]
    row["bytes"][FSDP1] = 0
    assert [(target.measured, target.is_met) for target in peaks_targets([row])] == [(1.0, False), (2.0, False)]


def test_dispatch_is_what_the_optimizer_takes_beside_its_arithmetic():
    host = {"optimizer on rows": 0.012, "plain optimizer": 0.010, OSDP: 0.1}
    (target,) = breakdown_targets([{"case": {"model": "m", "mode": "ZDP"}, "host_s": host}])
    assert target.measured == pytest.approx(0.02)
    assert target.is_met
