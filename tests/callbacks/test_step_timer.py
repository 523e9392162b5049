"""The timer, with events of a made-up device whose time is set by hand."""

import time
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch

from lightning_osdp.callbacks.plan_monitor import StepTimer
from lightning_osdp.profiler import samples_in


class Device:
    """Reaches what it was asked to do only when told so."""

    def __init__(self):
        self.recorded, self.num_passed, self.num_waits = [], 0, 0

    def wait(self, _):
        self.num_waits += 1
        self.num_passed = len(self.recorded)


@pytest.fixture
def device(monkeypatch):
    """Events pass in order; the n-th one that is recorded is at n * n milliseconds."""
    device = Device()

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "the current stream"
            self.place = len(device.recorded)
            device.recorded.append(self)

        def query(self):
            return self.place < device.num_passed

        def elapsed_time(self, end):
            assert self.query()
            assert end.query()
            return float(end.place**2 - self.place**2)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the current stream")
    monkeypatch.setattr(torch.cuda, "synchronize", device.wait)
    return device


def batch(timer, num_samples=4):
    timer.start()
    timer.stop(num_samples=num_samples)


def test_steps_are_told_once_the_device_has_ended_them(device):
    timer = StepTimer(torch.device("cuda"))
    for _ in range(3):
        batch(timer)
        timer.end_step()
    assert list(timer.finished()) == []
    device.num_passed = 3  # within the second step
    assert list(timer.finished()) == [(0.001, 4)]
    assert list(timer.finished()) == []
    device.num_passed = 6
    assert list(timer.finished()) == [(0.005, 4), (0.009, 4)]
    assert device.num_waits == 0


def test_waiting_is_for_the_end_only(device):
    timer = StepTimer(torch.device("cuda"))
    batch(timer)
    timer.end_step()
    assert list(timer.finished(wait=True)) == [(0.001, 4)]
    assert device.num_waits == 1


def test_micro_batches_add_up_to_a_step(device):
    timer = StepTimer(torch.device("cuda"))
    batch(timer, 4)
    batch(timer, 3)
    timer.end_step()
    device.num_passed = 3  # the second micro-batch goes on
    assert list(timer.finished()) == []
    device.num_passed = 4
    assert list(timer.finished()) == [(0.006, 7)]


def test_steps_that_do_not_count_are_forgotten(device):
    timer = StepTimer(torch.device("cuda"))
    batch(timer)
    timer.end_step(counts=False)
    batch(timer)
    timer.end_step()
    device.num_passed = 4
    assert list(timer.finished()) == [(0.005, 4)]


def test_on_cpu_a_batch_has_ended_when_it_returns(monkeypatch):
    times = iter([10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    timer = StepTimer(torch.device("cpu"))
    batch(timer)
    batch(timer)
    timer.end_step()
    assert list(timer.finished(wait=True)) == [(0.75, 8)]


@dataclass
class Tokens:
    ids: torch.Tensor


@pytest.mark.parametrize("kind", [dict, UserDict, Tokens])
def test_samples_are_counted_in_batches_of_any_kind(kind):
    """A `BatchEncoding` of transformers is a UserDict."""
    assert samples_in(kind(ids=torch.ones(3, 2))) == 3
    assert samples_in(torch.ones(())) == 1
