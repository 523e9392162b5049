"""The trace of a step: against the rules of its format, torch's own readers of it, and the simulator's totals."""

import dataclasses
import json
from itertools import pairwise

import pytest
from torch._inductor.analysis.profile_analysis import JsonProfile
from torch.profiler._trace_validator import validate_trace

from lightning_osdp.core.axes import LEVELS, Treatment
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.planner.simulation import planned_step, simulate
from lightning_osdp.report.trace import STREAMS, chrome_trace

REQUIRED = {
    "X": {"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"},
    "M": {"ph", "name", "pid", "tid", "ts", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
}


def offloading(plan):
    return dataclasses.replace(plan, blocks=(Block(name="h.1", treatment=Treatment(saves="offload")),))


def recomputing(plan):
    return dataclasses.replace(plan, blocks=(Block(name="h.2", treatment=Treatment(saves="recompute")),))


CASES = {
    "one micro-batch": lambda planned: planned(),
    "offload": lambda planned: offloading(planned(1000)),
    "recompute": lambda planned: recomputing(planned(1000)),
    "two micro-batches": lambda planned: planned(number=2),
    "three micro-batches": lambda planned: planned(number=3),
    "seven micro-batches": lambda planned: offloading(planned(1000, number=7)),
}


@pytest.fixture(params=CASES)
def plan(request, planned):
    return CASES[request.param](planned)


@pytest.fixture(params=[True, False], ids=["overlapped", "blocking"])
def links(request, ranks):
    return dataclasses.replace(ranks, overlaps=request.param)


def of_stream(trace, stream):
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == STREAMS.index(stream)]


def total_s(events):
    return sum(event["dur"] for event in events) / 1e6


def test_every_event_keeps_the_rules_of_the_format(plan, profile, links):
    trace = json.loads(json.dumps(chrome_trace(plan, profile, links), allow_nan=False))
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M", "C"}
    for event in trace["traceEvents"]:
        assert event.keys() == REQUIRED[event["ph"]]
        assert isinstance(event["name"], str)
        assert isinstance(event["ts"], (int, float))
        assert event["ts"] >= 0
        assert (event["pid"], event["tid"] in range(4)) == (0, True)
        assert event["ph"] != "X" or event["dur"] > 0
        assert event["ph"] != "C" or all(isinstance(value, int) for value in event["args"].values())
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["compute stream", "communication stream", "copy stream", "host stream"]
    for stream in STREAMS:
        events = of_stream(trace, stream)
        for event, following in pairwise(events):  # complete events of a thread must nest
            assert event["ts"] + event["dur"] <= following["ts"] + 1e-3


def test_totals_are_those_of_the_simulator(plan, profile, links):
    trace, estimate = chrome_trace(plan, profile, links), simulate(plan, profile, links)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in events) / 1e6 == pytest.approx(estimate.time_s)
    assert total_s(of_stream(trace, "communication")) == pytest.approx(estimate.communication_s)
    busy_s = total_s(of_stream(trace, "compute")) + total_s(of_stream(trace, "copy"))
    assert busy_s == pytest.approx(estimate.compute_s + estimate.overhead_s)
    memory = [sum(event["args"].values()) for event in trace["traceEvents"] if event["ph"] == "C"]
    assert max(memory) == pytest.approx(estimate.peak.peak_bytes, abs=10)  # each part is rounded
    assert trace["otherData"]["step_time_s"] == estimate.time_s
    assert trace["otherData"]["peak_bytes"] == estimate.peak.peak_bytes
    assert [event["name"] for event in events].count("optimizer step") == 1
    numbers = {event["args"]["micro-batch"] for event in events if "micro-batch" in event["args"]}
    assert numbers == {*range(plan.num_micro_batches)}


def test_copies_are_drawn_in_their_own_stream(planned, profile, ranks):
    plan = offloading(planned(1000, number=2))
    copies = of_stream(chrome_trace(plan, profile, ranks), "copy")
    copy_s = 2 * 2 * 2**20 * ranks.host_copy_s_per_byte  # two samples of 2 MiB
    assert [event["name"] for event in copies] == ["copy to host", "copy from host"] * 2
    assert [event["dur"] for event in copies] == [pytest.approx(1e6 * copy_s)] * 4
    assert of_stream(chrome_trace(planned(1000), profile, ranks), "copy") == []


@pytest.mark.parametrize("number", [1, 5])
def test_updates_on_the_host_are_drawn_beside_backward(planned, profile, ranks, number):
    plan = planned(1000, number=number)
    hosted = [unit.treated(states="host") if unit.gradient_bytes != 0 else unit for unit in plan.units]
    plan = dataclasses.replace(plan, units=tuple(hosted))
    optimizer = dataclasses.replace(profile.optimizer, host_s_per_element=1e-12, host_is_ahead=True)
    profile = dataclasses.replace(profile, optimizer=optimizer)
    ranks = dataclasses.replace(ranks, overlaps=True, has_streams=True)
    trace = chrome_trace(plan, profile, ranks)
    updates, estimate = of_stream(trace, "host"), simulate(plan, profile, ranks)
    step, modes = planned_step(plan, profile, ranks)
    names = [unit.name for unit, mode in zip(step.units, modes, strict=True) if mode["states"] == "host"]
    assert sorted(event["args"]["unit"] for event in updates) == sorted(names) != []
    reduced = [event for event in of_stream(trace, "communication") if event["name"].startswith("reduce-scatter")]
    assert updates[0]["ts"] >= reduced[-len(updates)]["ts"]  # of the last micro-batch
    assert max(event["ts"] + event["dur"] for event in updates) / 1e6 <= estimate.time_s


def test_what_runs_again_is_drawn_apart_from_backward(planned, at_levels, ranks):
    plan, profile = planned(1000, number=2), at_levels
    level = Block(name="h.1", treatment=Treatment(saves=LEVELS[0]), kept=(0,))
    again = dataclasses.replace(plan, blocks=(level, *recomputing(plan).blocks))
    events = of_stream(chrome_trace(again, profile, ranks), "compute")
    names, durations = zip(*((each["name"], each["dur"]) for each in events if "again" in each["name"]), strict=True)
    assert names == ("backward h.2: forward again", "backward h.1: forward again") * 2
    assert durations == tuple(pytest.approx(each) for each in (8e3, 4e3) * 2)  # us of two samples
    following = events[[each["name"] for each in events].index(names[0]) + 1]
    assert (following["name"], following["dur"]) == ("backward h.2.mlp", pytest.approx(8e3))
    kept = of_stream(chrome_trace(plan, profile, ranks), "compute")
    assert not any("again" in each["name"] for each in kept)


def test_each_micro_batch_has_every_forward_once(planned, profile, ranks):
    trace = chrome_trace(planned(1000, number=7), profile, ranks)
    for number in range(7):
        names = [
            event["name"]
            for event in of_stream(trace, "compute")
            if event["args"].get("micro-batch") == number and event["name"].startswith("forward")
        ]
        assert names == [
            f"forward {segment.operator or 'loss'}" for segment in profile.segments if segment.forward_s.at(2)
        ]


def test_torch_reads_it(planned, profile, ranks, tmp_path):
    path = tmp_path / "step.json"
    path.write_text(json.dumps(chrome_trace(planned(), profile, ranks)))
    assert validate_trace(str(path)) == (True, [])
    read = JsonProfile(str(path))
    assert list(read._devices) == [0]
    kernels = [event for event in read.events if event.get("cat") == "kernel"]
    estimate = simulate(planned(), profile, ranks)
    total = estimate.compute_s + estimate.overhead_s + estimate.communication_s
    assert sum(event["dur"] for event in kernels) / 1e6 == pytest.approx(total)


def test_the_command_writes_it_and_says_what_a_step_takes(folder, run, answer, planned, profile, ranks):
    code, out, err = run("simulate", "--trace", "step.json")
    assert (code, err) == (0, "")
    assert json.loads((folder / "step.json").read_text()) == chrome_trace(planned(), profile, ranks)
    document, estimate = answer("simulate"), simulate(planned(), profile, ranks)
    assert (document["time_s"], document["peak_bytes"]) == (estimate.time_s, estimate.peak.peak_bytes)
    assert "80.0 MiB" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_step_over_the_limit_ends_with_1(folder, run, planned):
    dataclasses.replace(planned(), memory_limit_bytes=2**20).save("small.json")
    assert run("simulate", "--plan", "small.json")[0] == 1


def test_a_trace_that_cannot_be_written_is_told(folder, run):
    code, out, err = run("simulate", "--trace", "osdp_plan.json/step.json")
    assert (code, out) == (2, "")
    assert "Expected a file that can be written for trace, got 'osdp_plan.json/step.json'" in err
