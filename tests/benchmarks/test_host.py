"""Models that a device has no room for at their smallest, and targets of rows that are made up."""

import json

import pytest

from benchmarks import contest as program
from benchmarks.measures.beside_fsdp.host import ON_HOST, UNFUSED, table, targets


@pytest.mark.distributed
@pytest.mark.slow
def test_plans_fit_every_device_and_all_is_written(tmp_path, capsys):
    output = tmp_path / "results.json"
    program.main("host", output=output, num_rounds=1, quick=True)
    results = json.loads(output.read_text())
    assert results.keys() == {"emulated", "computed"}
    for (row,) in (section["rows"] for section in results.values()):
        own = {each["need"]: each for each in row["entrants"] if each["name"] == "OSDP"}
        assert [*own] == row["case"]["needs"]
        for need, each in own.items():
            assert each["counted_bytes"] * need <= row["base_bytes"] * 1.001
            assert each["counted_bytes"] == pytest.approx(each["predicted_bytes"], rel=0.02)
            assert each["counted_host_bytes"] == pytest.approx(each["predicted_host_bytes"], rel=0.02)
        assert all(each["measured_s"] > 0 for each in row["entrants"])
        assert {ON_HOST, UNFUSED} <= {each["name"] for each in row["entrants"]}
    printed = capsys.readouterr().out.splitlines()
    program.main("host", output=output, num_rounds=1, quick=True)  # has nothing left to measure
    assert capsys.readouterr().out.splitlines() == [line for line in printed if ": Case(" not in line]


def entrant(name, measured_s, *, need=2.0, predicted_s=None, counted_bytes=50, **fields):
    return {
        "name": name, "need": need, "plan": "", "counted_bytes": counted_bytes, "predicted_bytes": counted_bytes,
        "counted_host_bytes": 100, "predicted_host_bytes": 100, "predicted_s": predicted_s, "measured_s": measured_s,
        "num_taken": 0, **fields,
    }  # fmt: skip


def test_targets_are_means_and_the_farthest_cells():
    entrants = [
        entrant(ON_HOST, 3.0),
        entrant(UNFUSED, 5.0),
        entrant("recompute", 2.0, predicted_s=1.5),
        entrant("OSDP", 2.0, predicted_s=1.9, counted_bytes=55, predicted_bytes=50),
        entrant(ON_HOST, 2.0, need=4.0, counted_host_bytes=None, predicted_host_bytes=None),
        entrant("OSDP", 4.0, need=4.0, predicted_s=4.4, counted_bytes=20, predicted_host_bytes=104),
    ]
    case = {"link_gb_s": 2.0, "tokens": 256, "needs": [2.0, 4.0, 8.0], "computes": False}
    rows = [{"case": case, "scale": 0.1, "base_bytes": 100, "bounds_s": [1.8, 2.0, 3.0], "entrants": entrants}]
    found = {target.name: (pytest.approx(target.measured), target.is_met) for target in targets(rows)}
    two, four = "farthest at 2 GB/s, 256 tokens, 2x", "farthest at 2 GB/s, 256 tokens, 4x"
    assert found == {
        f"OSDP over {ON_HOST}: mean": (1.0, False),
        f"OSDP over {UNFUSED}: mean": (2.5, True),
        "devices that OSDP trains on": (2, False),
        f"OSDP over the best other, {four}": (0.5, False),
        f"OSDP, of the bound, {four}": (0.5, False),
        f"predicted step off by, {two}, recompute": (0.25, False),
        f"bytes of the device over those it has, {two}": (1.1, False),
        f"peak of the device predicted too low by, {two}": (0.1, False),
        f"peak of the device predicted too high by, {four}": (0.0, True),
        f"peak of the host predicted too low by, {two}": (0.0, True),
        f"peak of the host predicted too high by, {four}": (0.04, False),
    }
    assert table(rows).row_count == len(entrants)
