"""Batches of different lengths: the largest is planned for, or what is passed is told of at once."""

import dataclasses
import warnings
from itertools import islice
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy, PlanMonitor
from lightning_osdp.report.tables import render
from lightning_osdp.strategy.planning import profile_fit
from tests.distributed.support.fits import EVERYTHING, failure, trainer, without_measuring
from tests.distributed.support.models import BATCH_SIZE, Base
from tests.distributed.support.user_runs import Adapter, Chain, ddp, difference, fitted

pytestmark = pytest.mark.distributed


WIDTH = 16
LENGTHS = [3, 3, 4, 3, 3, 3, 40, 3, 3, 3]
"""Lengths of this rank's batches; the seventh of rank 1 is longer still."""


class Reader(Base):
    """Works on sequences, whose lengths are those of the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def loss(self, batch):
        return self.second(torch.tanh(self.first(batch))).square().mean()


def batches():
    """A loader of them."""
    lengths = [length + 20 * dist.get_rank() if length == max(LENGTHS) else length for length in LENGTHS]
    return DataLoader([torch.ones(BATCH_SIZE, length, WIDTH) for length in lengths], batch_size=None)


def choose(read):
    return max(islice(read, 3), key=torch.numel)


def fit(**options):
    """Plan, what the monitor found, its table, and what was told."""
    own = {"batch_size": "keep", "search_space": EVERYTHING, **options}
    fitting = trainer(OSDPStrategy(**own), max_steps=len(LENGTHS))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fitting.fit(Reader(), batches())
    monitor = next(callback for callback in fitting.callbacks if isinstance(callback, PlanMonitor))
    texts = [str(each.message) for each in told if "OSDP" in str(each.message)]
    return fitting.strategy.plan.peak_bytes, monitor.measured.peak_bytes, render(monitor.comparison()), texts


@without_measuring
def varying():
    """Fits by what is profiled."""
    given = torch.ones(BATCH_SIZE, 60, WIDTH)
    first = fit()
    between = (first[0] + first[1]) // 2
    return {
        "first": first,
        "longest": fit(profile_batch="longest"),
        "given": fit(profile_batch=given),
        "chosen": fit(profile_batch=choose),
        "limited": fit(memory_limit=f"{between}B", longer_batches=False),
    }


@without_measuring
def sizes():
    """Returns the error of micro-batches as large as the data, limits in percent, and scaled micro-batches."""
    data = DataLoader(torch.ones(12, 3, WIDTH), batch_size=2)

    def fitted(**options):
        strategy = OSDPStrategy(search_space=EVERYTHING, **options)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer(strategy, max_steps=1, use_distributed_sampler=True).fit(Reader(), data)
        return strategy.plan, " ".join(str(each.message) for each in told)

    half, _ = fitted(memory_limit="50%")
    scaled, told = fitted(batch_size="scale")
    return {
        "beyond": failure(lambda: fitted(batch_size=512)),
        "half": half.memory_limit_bytes,
        "scaled": (scaled.memory_limit_bytes, scaled.micro_batch_size, told),
    }


class Tuned(Base):
    """LoRA: blocks of frozen layers, with two small matrices beside each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(Adapter(nn.Linear(64, 256)), nn.GELU(), Adapter(nn.Linear(256, 64))) for _ in range(4)]
        )

    def loss(self, batch):
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()


@without_measuring
def adapted():
    """Limit, predicted and measured peak of LoRA in little memory, and in more; its blocks keep what they save."""
    data = DataLoader([torch.ones(BATCH_SIZE, 8, 64) for _ in range(5)], batch_size=None)
    space = dataclasses.replace(EVERYTHING, activations=("keep",), slices=(1,))

    def fitted(**options):
        fitting = trainer(OSDPStrategy(batch_size="keep", search_space=space, **options), max_steps=5)
        fitting.fit(Tuned(), data)
        monitor = next(callback for callback in fitting.callbacks if isinstance(callback, PlanMonitor))
        return fitting.strategy.plan, monitor.measured.peak_bytes

    free, measured = fitted()
    found = [(free.memory_limit_bytes, free.peak_bytes, measured)]
    for share in (0.05, 0.5):
        limit_bytes = round(free.all_zdp_peak_bytes + share * (free.peak_bytes - free.all_zdp_peak_bytes))
        plan, measured = fitted(memory_limit=f"{limit_bytes}B")
        found.append((limit_bytes, plan.peak_bytes, measured))
    return found


@without_measuring
def too_large():
    """A model for which there is no room on a device, beside the same that is profiled on one, and DDP."""
    found = {}
    expected = fitted(ddp(), Chain(), max_steps=4)
    for name, is_moved in (("moved", profile_fit.FitProfiler._is_moved), ("too large", lambda self: False)):
        module = Chain()
        module.first.weight.mark = "kept"
        with mock.patch.object(profile_fit.FitProfiler, "_is_moved", is_moved):
            own = fitted(OSDPStrategy(search_space=EVERYTHING), module, max_steps=4)
        plan, off = own[2].strategy.plan, difference(own, expected)
        found[name] = off, plan.peak_bytes, [unit.parameter_bytes for unit in plan.units], module.first.weight.mark
    return found


@pytest.mark.slow
def test_the_longest_batch_can_be_planned_for_and_what_is_passed_is_told(ranks):
    for rank, found in enumerate(ranks(2).run(varying)):
        (predicted, measured, table, told), longest = found["first"], found["longest"]
        assert measured > 3 * predicted  # the seventh step's, not one of the first
        assert "peak memory (steps 3 to 5, 7)" in table
        factor = (40 + 20 * rank) / 3
        assert f"OSDP: rank {rank} has a batch with {4 / 3:.3g} times as many elements" in " ".join(told)
        assert factor > 4
        assert longest[0] == found["given"][0] > predicted
        assert longest[1] <= longest[0] * 1.02
        assert longest[3] == []
        assert predicted < found["chosen"][0] < longest[0]
        assert "over memory_limit" not in " ".join(told)
        (over,) = [text for text in found["limited"][3] if "over memory_limit" in text]
        assert "step 7 took" in over
        assert f"on rank {rank}" in over


def test_micro_batches_as_large_as_the_data_and_limits_in_percent(ranks):
    for rank, found in enumerate(ranks(2).run(sizes)):
        kind, told = found["beyond"]
        assert kind == "ConfigurationError"
        assert "got 512: the training data have 6 samples for a rank. Use at most 6." in told
        assert found["half"] == 2**33
        limit_bytes, micro_batch_size, told = found["scaled"]
        assert limit_bytes == round(0.95 * 2**34)
        assert micro_batch_size == 6
        assert rank or "is all that a rank has of the training data" in told


@pytest.mark.slow
def test_lora_keeps_its_limit(ranks):
    for found in ranks(2).run(adapted):
        assert len({predicted for _, predicted, _ in found}) > 1
        for limit_bytes, predicted, measured in found:
            assert predicted <= limit_bytes
            assert 0.99 * measured <= predicted <= 1.02 * measured


def test_a_model_that_does_not_fit_on_a_device_is_profiled_by_its_shapes(ranks):
    for found in ranks(2).run(too_large):
        off, *planned = found["too large"]
        assert off < 1e-10
        assert tuple(planned) == found["moved"][1:]
        assert planned[-1] == "kept"
