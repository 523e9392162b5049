"""State that a step leaves behind after a batch, and after its halves."""

import copy
import itertools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from lightning_osdp.profiler import why_state_differs

BATCH = (torch.arange(24.0).view(6, 4).sin(), torch.arange(6.0).cos())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(6, 4))
        self.steps, self.collected, self.own = 0, [], SimpleNamespace(seen=0, values=np.zeros(3), recent=deque())
        self.mean, self.sum, self.errors = torchmetrics.MeanMetric(), torchmetrics.SumMetric(), torchmetrics.CatMetric()
        self.square = torchmetrics.MeanSquaredError()
        self.generator, self.python = np.random.default_rng(0), random.Random(0)
        self.cache = None

    def loss(self, batch):
        return F.mse_loss(self.net(batch[0])[:, 0], batch[1])


def averages(model, batch):
    for teacher, student in zip(model.teacher.parameters(), model.net.parameters(), strict=True):
        teacher.data.lerp_(student.data, 0.1)  # at its fixed point


def counts(model, batch):
    model.steps += 1


def anneals_beside(model, batch):
    model.own.seen += len(batch[0]) > 3


def collects(model, batch):
    model.collected.append(model.loss(batch).detach())


def moves(model, batch):
    model.queue = torch.cat([batch[0][:1], model.queue[:-1]])


def moves_in_place(model, batch):
    model.queue[0] = 0.0


def remembers(model, batch):
    model.own.recent.append(len(batch[0]))


def by_numpy(model, batch):
    model.own.values += 1


def takes(model, batch):
    model.numbers = getattr(model, "numbers", itertools.count())


def sets_weights(model, batch):
    model.net[0].weight.data = model.net[0].weight.data * 0.5


def meters(model, batch):
    model.sum.update(1)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (averages, "a step writes to teacher."),
        (counts, "steps is another after a batch than after its halves"),
        (anneals_beside, "own.seen is another"),
        (collects, "collected"),
        (moves, "queue is another"),
        (moves_in_place, "a step writes to queue"),
        (remembers, "own.recent"),
        (by_numpy, "own.values is another"),
        (takes, "numbers is another"),
        (sets_weights, "net.0.weight is another"),
        (meters, "sum is another"),
    ],
)
def test_what_happens_once_for_each_micro_batch_is_named(act, why):
    model = Model()
    before, steps = {name: value.clone() for name, value in model.state_dict().items()}, model.steps

    def run(batch):
        act(model, batch)
        return model.loss(batch)

    found = why_state_differs(model, run, BATCH, batch_size=6)
    assert found is not None
    assert found.startswith(why), found
    assert model.steps == steps
    assert model.collected == []
    assert not model.own.recent
    assert not model.own.values.any()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_agrees_is_let_pass():
    model = Model()

    def run(batch):
        loss = model.loss(batch)
        model.mean.update(loss)
        model.errors.update(model.net(batch[0])[:, 0].detach())
        model.square.update(model.net(batch[0])[:, 0], batch[1])
        model.steps = max(model.steps, 1)
        model.cache = torch.arange(3)
        model.seen_noise = model.generator.random() > 2 or model.python.random() > 2
        return loss

    assert why_state_differs(model, run, BATCH, batch_size=6) is None
    assert model.cache is None
    assert not model.mean.update_called
