"""The peak of a training step on a made-up device, whose allocator is told what comes and goes."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.testbed.emulated.cuda import FakeCuda
from lightning_osdp.callbacks.peak import WARM_UP_STEPS, PeakCounter

KEPT, BEFORE = 1000, 10**6


@pytest.fixture
def gpu():
    with FakeCuda(total_bytes=2**30).installed() as device:
        yield device


def take_step(gpu, counter, num_steps, num_bytes):
    counter.start(None, None, num_steps=num_steps)
    gpu.allocate(num_bytes)
    gpu.allocate(-num_bytes)
    counter.stop()
    counter.end_step(num_steps=num_steps)


def test_on_cuda_the_peak_is_the_allocators_after_the_warm_up(gpu):
    counter = PeakCounter(torch.device("cuda", 0))
    gpu.allocate(KEPT)
    peaks = []
    for num_steps, num_bytes in enumerate([BEFORE] * WARM_UP_STEPS + [500, 200, 700, 100]):
        take_step(gpu, counter, num_steps, num_bytes)
        peaks.append(counter.peak_bytes)
    assert peaks == [None] * WARM_UP_STEPS + [KEPT + 500, KEPT + 500, KEPT + 700, KEPT + 700]
    assert list(counter.steps) == [3, 4, 5, 6]
    assert counter.other_bytes is None
    assert not counter.is_counting
    assert gpu.num_waits == 0


TRAINER = SimpleNamespace(model=torch.nn.Linear(2, 2), optimizers=[], callbacks=[], strategy=None)


def test_a_step_of_fewer_batches_does_not_lower_the_peak_of_the_others():
    counter, kept = PeakCounter(torch.device("cpu")), []
    for num_steps, num_batches in enumerate((2, 1), start=WARM_UP_STEPS):
        kept.clear()
        for _ in range(num_batches):
            counter.start(TRAINER, torch.zeros(4), num_steps=num_steps)
            kept.append(torch.zeros(2**10))
            counter.stop()
        counter.end_step(num_steps=num_steps)
    assert counter.peak_bytes >= 2 * kept[0].nbytes


def test_a_batch_that_is_skipped_leaves_nothing_counting():
    counter = PeakCounter(torch.device("cpu"))
    for _ in range(2):  # nobody says that the first one ends
        counter.start(TRAINER, torch.zeros(4), num_steps=WARM_UP_STEPS)
    counter.stop()
    kept = torch.zeros(2**20)
    counter.end_step(num_steps=WARM_UP_STEPS)
    assert counter.peak_bytes < kept.nbytes
