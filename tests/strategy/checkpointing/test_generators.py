"""Random number generators in checkpoints."""

import io
import random

import numpy as np
import pytest
import torch

from lightning_osdp.strategy.checkpointing import entries
from lightning_osdp.strategy.checkpointing.entries import Generators

pytestmark = pytest.mark.usefixtures("seeds_as_before")

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]


@pytest.fixture
def seeds_as_before():
    states = entries._states(torch.device("cpu"))
    yield
    entries._set(states, torch.device("cpu"))


@pytest.fixture
def ranks_are(monkeypatch):
    """Says how many ranks there are, this being rank 0, and notes what is told to the user."""
    texts = []
    monkeypatch.setattr(entries, "rank_zero_info", texts.append)
    monkeypatch.setattr(entries.dist, "get_rank", lambda: 0)

    def are(number):
        monkeypatch.setattr(entries.dist, "get_world_size", lambda: number)
        return texts

    return are


def drawn(device):
    kinds = (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn())  # noqa: NPY002
    return *kinds, torch.rand(1).item(), torch.rand(1, device=device).item()


def saved(device, *, is_mid_epoch):
    progress = {"total": {"started": 1, "processed": int(not is_mid_epoch)}}
    checkpoint = {"optimizer_states": [], "loops": {"fit_loop": {"epoch_progress": progress}}}
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002 (keeps the second of two numbers)
    Generators().save(checkpoint, device)
    return checkpoint


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_run_draws_the_same(ranks_are, device):
    device, texts = torch.device(device), ranks_are(1)
    checkpoint = saved(device, is_mid_epoch=False)
    expected = drawn(device)
    Generators().resume(checkpoint, device)
    assert drawn(device) == expected
    assert drawn(device) != expected
    assert texts == []


def test_in_mid_epoch_what_the_iterator_draws_is_forgotten(ranks_are):
    cpu = torch.device("cpu")
    for is_mid_epoch in (False, True):
        ranks_are(1)
        checkpoint = saved(cpu, is_mid_epoch=is_mid_epoch)
        expected, generators = drawn(cpu), Generators()
        generators.resume(checkpoint, cpu)
        drawn(cpu)
        generators.begin(cpu)
        assert (drawn(cpu) == expected) is is_mid_epoch
        generators.begin(cpu)
        assert drawn(cpu) != expected


def test_another_number_of_ranks_is_told_of(ranks_are):
    cpu, texts = torch.device("cpu"), ranks_are(3)
    checkpoint = saved(cpu, is_mid_epoch=True)
    expected, generators = drawn(cpu), Generators()
    generators.resume(checkpoint, cpu)
    generators.begin(cpu)
    assert drawn(cpu) != expected
    (text,) = texts
    assert "was written with a world size of 1, this run's is 3, so ranks keep their own random number" in text


def test_checkpoints_without_them_are_passed_over(ranks_are):
    texts, weights = ranks_are(1), {"state_dict": {}}
    Generators().save(weights, torch.device("cpu"))
    assert list(weights) == ["state_dict"]
    Generators().resume(weights, torch.device("cpu"))
    assert texts == []


@pytest.mark.parametrize("device", DEVICES)
def test_the_entry_can_be_read_with_weights_only(device):
    file = io.BytesIO()
    torch.save(saved(torch.device(device), is_mid_epoch=False), file)
    file.seek(0)
    (states,) = torch.load(file, weights_only=True)["osdp_rng"]
    assert set(states) >= {"torch", "python", "numpy"}
