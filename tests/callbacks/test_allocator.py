"""Peaks on CUDA, with a caching allocator of made-up numbers."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from lightning_osdp import Plan, PlanMonitor
from lightning_osdp.callbacks.peak import WARM_UP_STEPS, AllocatorPeaks, AllocatorWatch, PeakCounter
from lightning_osdp.core.axes import named
from lightning_osdp.core.plans.parts import Unit

CUDA = torch.device("cuda", 0)
PLAN = Plan(
    fingerprint={},
    world_size=1,
    units=(Unit(name="", operators=("net",), kind="Linear", treatments=named("DP"), parameter_bytes=4, time_s=0.0),),
    memory_limit_bytes=2**20,
    peak_bytes=50,
    micro_batch_size=1,
    num_micro_batches=1,
    step_time_s=0.1,
    samples_per_s=10.0,
    gap=0.0,
)


class Allocator:
    """Counts requests, rounded up to 512 bytes where they are active, in segments of 2 KiB."""

    def __init__(self, *, is_native=True):
        self.is_native, self.num_retries = is_native, 0
        self.reset(None)

    def reset(self, _):
        self.requested = 0

    def use(self, num_bytes):
        """Holds so many bytes for a moment."""
        self.requested = max(self.requested, num_bytes)

    def stats(self, _):
        active, reserved = -(-self.requested // 512) * 512, -(-self.requested // 2048) * 2048
        peaks = {
            "requested_bytes": self.requested * self.is_native,
            "allocated_bytes": active,
            "active_bytes": active * self.is_native,
            "reserved_bytes": reserved,
        }
        found = {name: {"all": {"current": 0, "peak": peak}} for name, peak in peaks.items()}
        return {**found, "num_alloc_retries": self.num_retries}


def put(allocator, monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", allocator.stats)
    return allocator


@pytest.fixture
def allocator(monkeypatch):
    return put(Allocator(), monkeypatch)


def test_what_lies_between_batches_does_not_count(allocator):
    watch = AllocatorWatch(CUDA)
    for num_bytes in (600, 700):
        watch.start()
        allocator.use(num_bytes)
        watch.stop()
        allocator.use(10**6)  # such as validation and checkpoints
        allocator.num_retries += 1
    assert watch.peaks == AllocatorPeaks(requested_bytes=700, active_bytes=1024, reserved_bytes=2048, num_retries=0)


def test_the_most_of_all_batches_counts_and_retries_add_up(allocator):
    watch = AllocatorWatch(CUDA)
    for num_bytes, retries in ((5000, 2), (100, 0), (200, 1)):
        watch.start()
        allocator.use(num_bytes)
        allocator.num_retries += retries
        watch.stop()
    assert watch.peaks == AllocatorPeaks(requested_bytes=5000, active_bytes=5120, reserved_bytes=6144, num_retries=3)


def test_an_allocator_of_cudas_own_says_what_it_knows(monkeypatch):
    allocator = put(Allocator(is_native=False), monkeypatch)
    watch = AllocatorWatch(CUDA)
    watch.start()
    allocator.use(600)
    watch.stop()
    assert watch.peaks == AllocatorPeaks(requested_bytes=1024, active_bytes=1024, reserved_bytes=2048)


def test_nothing_is_taken_of_a_batch_that_has_not_begun(allocator):
    watch = AllocatorWatch(CUDA)
    allocator.use(600)
    watch.stop()
    assert watch.peaks == AllocatorPeaks()


def test_peaks_are_of_the_steps_after_the_first(allocator):
    counter = PeakCounter(CUDA)
    for step in range(WARM_UP_STEPS + 2):
        for micro_batch in range(2):
            counter.start(None, None, num_steps=step)
            allocator.use(10**6 if step < WARM_UP_STEPS else 1000 + 100 * step + micro_batch)
            counter.stop()
        counter.end_step(num_steps=step)
        assert (counter.peak_bytes is None) == (step < WARM_UP_STEPS)
        assert (counter.allocator is None) == (step < WARM_UP_STEPS)
    assert counter.peak_bytes == 1000 + 100 * (WARM_UP_STEPS + 1) + 1
    assert list(counter.steps) == [WARM_UP_STEPS + 1, WARM_UP_STEPS + 2]


@pytest.fixture
def monitored(allocator, monkeypatch):
    """Has a monitor see steps on a made-up device; returns what it logged, and the monitor."""
    event = SimpleNamespace(record=lambda _: None, query=lambda: True, elapsed_time=lambda _: 100.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)

    def run(*steps):
        logged = {}
        monitor = PlanMonitor()
        trainer = SimpleNamespace(
            strategy=SimpleNamespace(root_device=CUDA, plan=PLAN),
            world_size=1,
            global_rank=0,
            global_step=0,
            loggers=[None],
            progress_bar_callback=None,
            _logger_connector=SimpleNamespace(should_update_logs=True),
        )
        module = SimpleNamespace(trainer=trainer, log=lambda name, value, **how: logged.update({name: (value, how)}))
        monitor.on_train_start(trainer, module)
        for num_bytes, retries in [(0, 0)] * WARM_UP_STEPS + list(steps):
            monitor.on_train_batch_start(trainer, module, torch.ones(4), 0)
            allocator.use(num_bytes)
            allocator.num_retries += retries
            trainer.global_step += 1
            monitor.on_train_batch_end(trainer, module, None, torch.ones(4), 0)
        return logged, monitor

    return run


def test_numbers_are_logged_from_the_host(monitored):
    logged, monitor = monitored((600, 0))
    values = {name: value.item() for name, (value, _) in logged.items()}
    assert values == {
        "osdp/step_time_s": 0.1,
        "osdp/samples_per_s": 40.0,
        "osdp/step_time_ratio": 1.0,
        "osdp/peak_bytes": 600,
        "osdp/peak_ratio": 12.0,
        "osdp/active_bytes": 1024,
        "osdp/reserved_bytes": 2048,
        "osdp/allocation_retries": 0,
    }
    # a number that is no tensor would be copied to the device, for which training waits
    assert {value.device.type for value, _ in logged.values()} == {"cpu"}
    in_bar = {name for name, (_, how) in logged.items() if how["prog_bar"]}
    assert in_bar == {"osdp/step_time_s", "osdp/samples_per_s", "osdp/step_time_ratio", "osdp/peak_ratio"}
    assert monitor.measured.allocator == AllocatorPeaks(requested_bytes=600, active_bytes=1024, reserved_bytes=2048)


def test_the_first_retry_is_told_of_once(monitored):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        monitored((600, 0), (5000, 1), (5000, 1))
    (text,) = [str(each.message) for each in told]
    for said in (f"step {WARM_UP_STEPS + 2} ", "rank 0", "5.00 KiB", "6.00 KiB", "memory_limit", "expandable_segments"):
        assert said in text
