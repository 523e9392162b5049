"""Code in each micro-batch that is not known to be harmless, and values of it that a step reads."""

import importlib
import inspect
import pkgutil
import random

import lightning as L
import pytest
import torch
import torchmetrics
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from lightning_osdp.profiler import halves_of
from lightning_osdp.strategy.planning import same_training
from lightning_osdp.strategy.planning.same_training import (
    HARMLESS,
    BatchIndex,
    LoggedReductions,
    PartCollate,
    is_part,
    split_batch,
    why_hooks_count,
)

COUNTING = {
    "lightning.pytorch.callbacks.spike.SpikeDetection",  # raises or skips by a running mean over batches
    "lightning.pytorch.tuner.lr_finder._LRCallback",  # a learning rate for each batch
}
"""Callbacks of Lightning that act in each micro-batch."""


def test_all_callbacks_of_lightning_and_torchmetrics_are_sorted():
    found = set()
    for package in (L.pytorch, torchmetrics):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith("__main__"):
                continue
            try:
                imported = importlib.import_module(module.name)
            except ImportError:  # an optional package is missing
                continue
            for name, kind in inspect.getmembers(imported, inspect.isclass):
                has_hooks = issubclass(kind, L.Callback) and any(
                    each in vars(kind) for each in same_training._BATCH_HOOKS
                )
                if has_hooks and kind.__module__ == module.name:
                    found.add(f"{module.name}.{name}")
    assert found == HARMLESS | COUNTING


class Trainer:
    def __init__(self, *callbacks):
        self.callbacks = list(callbacks)


class Counting(L.Callback):
    def on_before_zero_grad(self, *_):
        pass


class Clipping(L.LightningModule):
    def backward(self, loss):
        loss.backward()


class Averaging(L.LightningModule):
    def on_train_batch_end(self, *_):
        pass


@pytest.mark.parametrize(
    ("callbacks", "module", "why"),
    [
        ([L.pytorch.callbacks.ModelCheckpoint(), L.pytorch.callbacks.Timer()], L.LightningModule, None),
        ([Counting()], L.LightningModule, "on_before_zero_grad of Counting runs once for each micro-batch"),
        (
            [L.pytorch.callbacks.LambdaCallback(on_train_batch_end=print)],
            L.LightningModule,
            "on_train_batch_end of LambdaCallback runs once for each micro-batch",
        ),
        ([], Averaging, "on_train_batch_end of Averaging runs once for each micro-batch"),
        ([], Clipping, "backward of Clipping runs once for each micro-batch"),
    ],
)
def test_hooks_of_each_micro_batch_are_named(callbacks, module, why):
    assert why_hooks_count(Trainer(*callbacks), module()) == why


@pytest.mark.parametrize(
    "read",
    [
        lambda index: index % 2,
        lambda index: index == 0,
        lambda index: 3 - index,
        lambda index: [1, 2][index],
        lambda index: f"{index}",
        bool,
        range,
        lambda index: {index: 1},
        float,
        lambda index: index.bit_length(),
        lambda index: torch.ones(3)[index].item(),
        str,
    ],
)
def test_an_index_that_is_read_tells(read):
    given, passed = BatchIndex(0), BatchIndex(0)
    read(given)
    assert given.is_read
    assert read(BatchIndex(1)) == read(1)
    assert [passed]
    assert not passed.is_read


def test_what_is_logged_of_an_epoch_by_another_reduction_than_the_mean_is_told():
    logged = LoggedReductions()
    logged("loss", 1.0)
    logged("loss", 1.0, on_epoch=True)
    logged({"a": 1.0}, on_epoch=True, reduce_fx=torch.mean)
    logged("last", 1.0, on_step=True, reduce_fx="max")
    assert logged.why_not is None
    logged({"most": 1.0}, on_epoch=True, reduce_fx=torch.max)
    assert logged.why_not == "self.log('most', reduce_fx=max) reduces values of micro-batches, not by their mean"


def padded(samples):
    return pad_sequence(samples, batch_first=True)


def shuffled(samples):
    random.shuffle(samples)
    return default_collate(samples)


def named(samples):
    return {"x": default_collate([each.pop("x") for each in samples]), "names": [each["name"] for each in samples]}


@pytest.mark.parametrize(
    ("collate", "samples", "is_same"),
    [
        (default_collate, [(torch.ones(2) * i, i) for i in range(6)], True),
        (padded, [torch.ones(3 + i % 2) for i in range(6)], False),
        (padded, [torch.ones(3) for _ in range(6)], True),
        (shuffled, [torch.ones(3) * i for i in range(6)], False),
        (named, [{"x": i, "name": str(i)} for i in range(5)], True),
    ],
)
def test_batches_of_half_the_samples_are_compared_with_halves(collate, samples, is_same):
    random.seed(1)
    size = len(samples)
    whole, *halves = split_batch([PartCollate(collate, halves_of)(samples)])
    same = [is_part(whole, half, part, size) for half, part in zip(halves, halves_of(size), strict=True)]
    assert all(same) == is_same
