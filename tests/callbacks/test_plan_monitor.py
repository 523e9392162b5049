"""Sentences that PlanMonitor says once of a plan, by made-up seconds and bytes."""

from types import SimpleNamespace

import pytest
import torch

from lightning_osdp import PlanMonitor
from lightning_osdp.planner.scheduler.replanning.pace import WATCHED_STEPS
from tests.support.plans import bare_plan


@pytest.fixture
def monitor():
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    made = PlanMonitor()
    made._begin(
        SimpleNamespace(strategy=strategy, world_size=1, global_step=0),
        bare_plan(step_time_s=1.0, peak_bytes=900 * 2**20, memory_limit_bytes=1000 * 2**20),
    )
    return made


def test_steps_that_have_become_slower_are_told_once(monitor, caplog):
    told = []
    for seconds in (1.0, 1.1, 1.2, 1.3):
        finished = [(seconds, 4)] * WATCHED_STEPS
        monitor._timer = SimpleNamespace(finished=lambda wait, finished=finished: iter(finished))
        monitor._elements.extend([8] * WATCHED_STEPS)
        with caplog.at_level("INFO"):
            monitor._take_finished()
        told.append(caplog.text.count("OSDP: a step takes"))
    assert told == [0, 0, 1, 1]
    assert "takes 1.20 s, the median of the last 50, and took 1.00 s in the plan's first ones" in caplog.text


@pytest.mark.parametrize(
    ("peaks_mib", "told"),
    [
        ((900, 960, 969), 0),
        ((900, 975, 980), 1),
        ((None, 1001), 0),  # which is warned of
    ],
)
def test_a_peak_near_the_limit_is_told_once(monitor, caplog, peaks_mib, told):
    with caplog.at_level("INFO"):
        for peak in peaks_mib:
            monitor._peak = SimpleNamespace(peak_bytes=None if peak is None else peak * 2**20)
            monitor._tell_near_limit()
    assert caplog.text.count("OSDP: step 1 took") == told
    assert monitor.is_near_limit == bool(told)
    if told:
        assert "which leaves 25.0 MiB of memory_limit (0.98 GiB); 900 MiB was predicted." in caplog.text


def test_a_peak_near_the_limit_that_was_predicted_is_not_told(monitor, caplog):
    monitor._plan = bare_plan(step_time_s=1.0, peak_bytes=990 * 2**20, memory_limit_bytes=1000 * 2**20)
    monitor._peak = SimpleNamespace(peak_bytes=995 * 2**20)
    with caplog.at_level("INFO"):
        monitor._tell_near_limit()
    assert not caplog.text


@pytest.mark.parametrize(
    ("bar", "is_global_zero", "wanted", "due", "number"),
    [
        (object(), True, True, False, 4),
        (None, True, True, False, 0),
        (object(), False, True, False, 4),  # metrics that stop training are on all ranks, or on none
        (object(), True, False, False, 0),
        (None, False, True, True, 4),
    ],
)
def test_between_logs_values_are_made_for_a_bar_alone(monkeypatch, monitor, bar, is_global_zero, wanted, due, number):
    monkeypatch.setattr("lightning_osdp.callbacks.plan_monitor._REFRESH_S", 0.0)
    monitor._progress_bar, logged = wanted, []
    monkeypatch.setattr(monitor, "_log", logged.append)
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(plan=monitor._plan),
        global_step=0,
        global_rank=0,
        is_global_zero=is_global_zero,
        progress_bar_callback=bar,
        _logger_connector=SimpleNamespace(should_update_logs=due),
    )
    monkeypatch.setattr(monitor._peak, "start", lambda *_, **__: None)
    for _ in range(4):
        monitor.on_train_batch_start(trainer, None, torch.ones(4), 0)
        trainer.global_step += 1
        monitor.on_train_batch_end(trainer, None, None, torch.ones(4), 0)
    assert len(logged) == number
