"""The check of a GPU where there is none: its emulated half holds, and what fails is told."""

import json

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.measures.gpu import emulated, one_device, two_devices
from benchmarks.measures.gpu.finding import Finding, findings_of
from tests.support.tiers import slow

CPU = torch.device("cpu")


def holds(check):
    findings = list(check(CPU))
    assert [str(finding) for finding in findings if not finding.is_good] == []
    return findings


@pytest.mark.parametrize("name", ["clock", "memory", "attention"])
def test_what_is_emulated_is_as_it_must_be(name):
    assert len(holds(emulated.EMULATED[name])) >= 2


@pytest.mark.slow
def test_traces_on_an_accelerator_are_those_on_cpu():
    findings = holds(emulated.accelerator)
    assert len(findings) == len(emulated.FAMILIES)
    of = {finding.name.rpartition(" ")[2]: finding.numbers for finding in findings}
    assert of["mingpt"]["choices"] == ["keep", "offload", "recompute"]
    assert all(numbers["saved_bytes"] > 0 for numbers in of.values())


@pytest.mark.parametrize(
    "name",
    [name if name in {"environment", "stopwatch"} else slow(name) for name in one_device.ON_ANY_DEVICE],
)
def test_checks_of_one_device_hold_on_cpu(name):
    assert holds(one_device.ON_ANY_DEVICE[name])


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", two_devices.ON_TWO)
def test_checks_of_two_devices_hold_on_gloo(name):
    assert holds(two_devices.ON_TWO[name])


def test_which_half_is_run_depends_on_the_devices():
    emulated_half, without = gpu_check.chosen_checks(0, [])
    one, with_one = gpu_check.chosen_checks(1, [])
    two, _ = gpu_check.chosen_checks(2, [])
    assert "emulated half" in without
    assert "sync_debug" in without
    assert "links" in with_one
    assert emulated_half.keys() == two.keys() - one_device.ON_CUDA.keys()
    assert one.keys() == two.keys() - (two_devices.ON_TWO.keys() - two_devices.ON_SHARED.keys())
    assert [*gpu_check.chosen_checks(1, ["peaks"])[0]] == ["peaks"]
    with pytest.raises(ValueError, match="links"):
        gpu_check.chosen_checks(1, ["links"])


def broken(device):
    yield Finding("first", is_good=True, numbers={"x": 0.123456})
    raise RuntimeError("the device is gone")


def test_a_check_that_raises_has_failed_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    checks = {"broken": broken, "environment": one_device.environment}
    monkeypatch.setattr(gpu_check, "chosen_checks", lambda *_: (checks, "half of a test."))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(tmp_path / "found.json")
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "PASS  first: x=0.1235" in printed
    assert "FAIL  broken: error=RuntimeError: the device is gone" in printed
    assert "half of a test" in printed
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert [each["is_good"] for each in found] == [True, False, True, True, True]
    assert found[2]["name"] == "broken ran"


def test_every_check_tells_how_long_it_took():
    *_, last = findings_of("environment", one_device.environment, CPU)
    assert last.name == "environment ran"
    assert last.numbers["seconds"] > 0
