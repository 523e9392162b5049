"""The benchmark of engines at its smallest, and what it makes of rows."""

import json

import pytest

from benchmarks import engines
from benchmarks.measures.engines import breakdown_targets, peaks_targets, times_ratio, times_targets
from benchmarks.testbed.engines import BY_HAND, BY_HAND_ON_ROWS, CONTESTANTS, FSDP1, FSDP2


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


def row_of(rate_mbit, seconds, apart):
    return {"case": {"model": "m", "mode": "ZDP", "rate_mbit": rate_mbit}, "seconds": seconds, "apart": apart}


def test_what_ran_apart_is_compared_through_what_ran_in_both():
    here = {BY_HAND: [2.0, 4.0], BY_HAND_ON_ROWS: [2.0, 4.0], FSDP2: [3.0, 6.0]}
    row = row_of(200.0, here, {BY_HAND: [4.0, 4.0], FSDP1: [5.0, 5.0]})
    assert times_ratio(row, FSDP2, BY_HAND) == 1.5
    assert times_ratio(row, FSDP1, FSDP2) == pytest.approx(1.25 / 1.5)
    together = row_of(200.0, {**here, FSDP1: [6.0, 12.0]}, {})
    assert times_ratio(together, FSDP1, FSDP2) == 2.0


@pytest.mark.parametrize(("rate_mbit", "least"), [(200.0, 0.97), (1000.0, 0.95), (None, None)])
def test_targets_are_those_of_the_rate(rate_mbit, least):
    row = row_of(rate_mbit, {BY_HAND: [1.0], BY_HAND_ON_ROWS: [0.99], FSDP1: [0.96], FSDP2: [1.0]}, {})
    *speeds, by_hand, on_rows = times_targets([row])
    assert [(target.limit, target.measured, target.is_least) for target in speeds] == (
        [] if least is None else [(least, 0.96, True)]
    )
    assert (by_hand.is_met, on_rows.is_met) == (True, True)


def test_dispatch_is_what_the_optimizer_takes_beside_its_arithmetic():
    host = {"optimizer on rows": 0.012, "plain optimizer": 0.010, FSDP2: 0.1}
    (target,) = breakdown_targets([{"case": {"model": "m", "mode": "ZDP"}, "host_s": host}])
    assert target.measured == pytest.approx(0.02)
    assert target.is_met
