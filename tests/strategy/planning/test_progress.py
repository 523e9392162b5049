"""Lines that people see while a fit is planned."""

import io

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_osdp import Cluster, TrainingStep, make_plan, profile_model
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Link
from lightning_osdp.strategy.planning import publish as shown
from lightning_osdp.strategy.planning.publish import shown_progress


@pytest.fixture
def lines(monkeypatch):
    """Lines that the log is given; the clock stands still until it is set."""
    found = []
    monkeypatch.setattr(shown, "rank_zero_info", found.append)
    monkeypatch.setattr(shown, "Console", lambda: Console(file=io.StringIO(), force_terminal=False))
    return found


def at(monkeypatch, seconds):
    monkeypatch.setattr(shown.time, "perf_counter", lambda: seconds)


def test_a_pipe_gets_one_line_for_a_stage(lines):
    with shown_progress(is_global_zero=True) as tell:
        tell("tracing the model", "")
        for i in range(1, 100):
            tell("timing 8 samples", f"operator {i} of 99")
        tell("searching", "micro-batch 8")
    assert lines == [
        "OSDP: tracing the model",
        "OSDP: timing 8 samples, operator 1 of 99",
        "OSDP: searching, micro-batch 8",
    ]


def test_a_pipe_gets_another_line_for_a_long_stage(lines, monkeypatch):
    with shown_progress(is_global_zero=True) as tell:
        for seconds in range(25):
            at(monkeypatch, 100.0 + seconds)
            tell("searching", f"after {seconds} s")
    assert lines == [f"OSDP: searching, after {seconds} s" for seconds in (0, 10, 20)]


def test_a_terminal_has_one_line_that_changes_and_goes(monkeypatch, lines):
    text = io.StringIO()
    terminal = {"file": text, "force_terminal": True, "width": 40, "_environ": {"TERM": "xterm"}}
    monkeypatch.setattr(shown, "Console", lambda: Console(**terminal))
    with shown_progress(is_global_zero=True) as tell:
        tell("tracing the model", "")
        tell("timing 8 samples", "operator 3 of 12 with a [bold] name that is too long for a line")
    written = text.getvalue()
    assert "OSDP: tracing the model" in written
    assert "OSDP: timing 8 samples, operator 3 of 12" in written
    assert written.endswith("\x1b[2K")  # the line is erased
    assert written.count("\n") <= 1
    assert lines == []


def test_a_terminal_is_left_in_order_by_an_error(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(shown, "Console", lambda: Console(file=text, force_terminal=True, _environ={"TERM": "xterm"}))

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), shown_progress(is_global_zero=True):
        fail()
    assert "\x1b[?25h" in text.getvalue()  # the cursor is there again


def test_other_ranks_show_nothing(lines):
    with shown_progress(is_global_zero=False) as tell:
        tell("searching", "")
    assert lines == []


def told_by(work):
    told = []
    work(lambda stage, detail: told.append((stage, detail)))
    return told


def test_profiling_and_searching_tell_their_stages():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    step = TrainingStep(
        lambda batch: model(batch).square().mean(), lambda module: [torch.optim.SGD(module.parameters(), lr=0.1)]
    )
    profiles = []
    told = told_by(lambda tell: profiles.append(profile_model(model, torch.ones(8, 4), step, progress=tell)))
    timed = [f"run {i} of 6" for i in range(1, 7)]
    assert told == [
        ("tracing the model", ""),
        *(("timing 8 samples", detail) for detail in timed),
        *(("timing 4 samples", detail) for detail in timed),
        ("profiling the optimizer", ""),
    ]

    link = Link(latency_s=1e-3, seconds_per_byte=1e-9)
    cluster = Cluster(world_size=2, all_gather=link, reduce_scatter=link)
    options = {"memory_limit_bytes": 2**20, "micro_batch_size": BatchPolicy.scale(8)}
    told = told_by(lambda tell: make_plan(profiles[0], cluster, progress=tell, **options))
    assert told[0] == ("searching", "micro-batch 1")
    assert {stage for stage, _ in told} == {"searching"}
    assert told[1][1].startswith("micro-batch 8, best ")
    assert told[1][1].endswith(" samples/s so far")
