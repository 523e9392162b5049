import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from lightning_osdp.profiler.step.snapshot import iterators_in, snapshot, untouched


class Everything(nn.Module):
    """Holds one of each thing that a training step may change."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.accuracy = torchmetrics.MeanSquaredError()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("unset", None)
        self.register_buffer("range", torch.arange(4).expand(3, 4))  # overlapping memory
        self.steps, self.constant = 0, torch.ones(4)
        self.outputs = {"train": [], "val": []}
        self.recent, self.seen, self.named = deque([1], maxlen=2), {1}, OrderedDict(a=1)
        self.counts, self.by_class = Counter(a=2), defaultdict(list, x=[1])
        self.generator = torch.Generator().manual_seed(7)
        self.state = (torch.zeros(2), [1])

    def forward(self, x):
        return self.body(x)

    def change(self):
        y = self(torch.randn(8, 4))
        y.sum().backward()
        self.accuracy(y.detach(), torch.zeros_like(y))
        self.average.data.mul_(0.9).add_(1)
        self.unset = torch.ones(2)
        self.register_buffer("cache", torch.ones(3))
        self.steps += 1
        self.constant += 1
        self.outputs["train"].append(y)
        self.recent.append(2)
        self.seen.add(2)
        self.named["b"] = 2
        self.counts["a"] += 1
        self.by_class["x"].append(2)
        self.by_class["y"].append(2)
        self.created = y
        self.state[0].add_(1)
        self.state[1].append(2)
        torch.randn(3, generator=self.generator)
        self.eval()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Everything()


def test_buffers_and_batch_norm_statistics_come_back(model):
    buffers = dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    with untouched(model):
        model.change()
        assert model.body[1].num_batches_tracked == 1
        assert not torch.equal(model.body[1].running_mean, before["body.1.running_mean"])
    after = dict(model.named_buffers())
    assert list(after) == list(before)
    assert all(after[name] is buffers[name] and torch.equal(after[name], before[name]) for name in before)
    assert model.unset is None
    assert "cache" not in model.state_dict()
    assert "cache" not in model._buffers


def test_attributes_come_back_and_new_ones_vanish(model):
    outputs = model.outputs
    with untouched(model):
        model.change()
        assert hasattr(model, "created")
    assert not hasattr(model, "created")
    assert model.steps == 0
    assert torch.equal(model.constant, torch.ones(4))
    assert model.outputs is outputs
    assert model.outputs == {"train": [], "val": []}
    assert list(model.recent) == [1]
    assert model.recent.maxlen == 2
    assert (model.seen, model.named, model.counts) == ({1}, OrderedDict(a=1), Counter(a=2))
    assert model.by_class == {"x": [1]}
    assert torch.equal(model.state[0], torch.zeros(2))
    assert model.state[1] == [1]


def test_metrics_come_back(model):
    model.accuracy(torch.ones(2), torch.zeros(2))
    before = model.accuracy.compute()
    with untouched(model):
        model.change()
        model.accuracy.reset()
    assert model.accuracy.update_count == 1
    assert model.accuracy.compute() == before


def test_training_flags_come_back(model):
    model.body[1].eval()
    with untouched(model):
        model.change()
    assert [module.training for module in (model, model.body, model.body[1])] == [True, True, False]


def test_gradients_are_absent_inside_and_come_back(model):
    gradient = torch.ones(4, 4)
    model.body[0].weight.grad = gradient
    with untouched(model):
        assert model.body[0].weight.grad is None
        model.change()
    assert model.body[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(4, 4))
    assert model.body[0].bias.grad is None


def test_generators_come_back(model):
    def draw():
        return (
            torch.rand(2).tolist(),
            random.random(),
            np.random.rand(),  # noqa: NPY002
            torch.rand(2, generator=model.generator).tolist(),
        )

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    expected = draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    model.generator.manual_seed(7)
    with untouched(model):
        draw()
        model.change()
    assert draw() == expected


def test_two_runs_draw_the_same_dropout(model):
    x, results = torch.ones(8, 4), []
    for _ in range(2):
        with untouched(model):
            results.append(model(x).detach())
    assert torch.equal(*results)
    assert (results[0] == 0).any()


def test_weights_that_their_own_forward_renormalizes_come_back():
    embedding = nn.Embedding(5, 4, max_norm=0.1)
    before = embedding.weight.detach().clone()
    with untouched(embedding):
        embedding(torch.tensor([1, 2]))
        assert not torch.equal(embedding.weight, before)
    assert torch.equal(embedding.weight, before)


def test_lists_that_hold_themselves_and_foreign_objects_are_left_alone():
    model = nn.Linear(2, 2)
    model.loop = []
    model.loop.append(model.loop)
    model.other, model.nan = object(), torch.tensor(float("nan"))
    with untouched(model):
        model.loop.clear()
    assert model.loop[0] is model.loop
    assert model.nan.isnan()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_sparse_meta_and_inference_tensors_are_left_alone():
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.fixed = torch.ones(2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    model.shape_only = torch.empty(2, device="meta")
    adjacency = model.adjacency
    with untouched(model):
        model.adjacency = torch.eye(2)
    assert model.adjacency is adjacency


def test_everything_comes_back_after_an_error(model):
    def fails_after_the_change():
        with untouched(model):
            model.change()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_after_the_change()
    assert model.steps == 0
    assert model.training
    assert model.body[1].num_batches_tracked == 0


class Meter:
    """An average of a user's, as many have one."""

    def __init__(self):
        self.total, self.history, self.owner = 0.0, [], None


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self):
        self.count = 0


class Holding(nn.Module):
    """Holds objects that hold what a step changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.meters = {"loss": Meter(), "slotted": Slotted()}
        self.meters["loss"].owner = self
        self.told = SimpleNamespace(steps=0, meter=Meter())
        self.seen, self.table = np.zeros(3), np.arange(3)
        self.table.flags.writeable = False
        self.hidden = [nn.BatchNorm1d(4)]  # no child
        self.random, self.state = random.Random(3), np.random.RandomState(3)
        self.generator = np.random.default_rng(3)

    def change(self):
        meter = self.meters["loss"]
        meter.total += 1.0
        meter.history.append(1)
        meter.new = 1
        self.meters["slotted"].count += 1
        self.meters["slotted"].unset = 1
        self.told.steps += 1
        self.told.meter.total += 1.0
        self.seen += 1
        self.hidden[0](torch.randn(8, 4))

    def draw(self):
        return self.random.random(), self.state.rand(), self.generator.random()


def test_what_other_objects_hold_comes_back():
    model = Holding()
    meter, statistics = model.meters["loss"], model.hidden[0].running_mean
    with untouched(model):
        model.change()
        assert (meter.total, model.told.steps) == (1.0, 1)
        assert statistics.abs().sum() > 0
    assert model.meters["loss"] is meter
    assert vars(meter) == {"total": 0.0, "history": [], "owner": model}
    assert model.meters["slotted"].count == 0
    assert not hasattr(model.meters["slotted"], "unset")
    assert (model.told.steps, model.told.meter.total) == (0, 0.0)
    assert model.seen.tolist() == [0.0, 0.0, 0.0]
    assert statistics.abs().sum() == 0


def test_generators_of_other_libraries_come_back():
    model = Holding()
    expected = Holding().draw()
    with untouched(model):
        assert model.draw() == expected
    assert model.draw() == expected


def test_parameters_that_a_step_is_known_to_change_come_back():
    model = nn.Linear(2, 2).requires_grad_(False)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    with untouched(model, changed={model.weight}):
        model.weight.mul_(2)
        model.bias.data = model.bias.data * 2
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.bias, bias)


def test_a_step_is_undone_when_that_is_asked_for_and_parameters_may_be_others_by_then():
    model, batch = nn.BatchNorm1d(3), torch.ones(2, 3)
    model.found, logged = [], {"loss": [0.5]}
    restore = snapshot(model, batch, logged)
    random.random(), torch.rand(2)
    model(batch.mul_(2))
    model.found.append(batch)
    model.weight = other = nn.Parameter(torch.zeros(3))
    logged["loss"].append(1.0)
    logged["more"] = 2.0
    model.weight.grad = torch.ones(3)
    expected = drawn_next(restore)
    assert drawn_next(restore) == expected
    assert (model.num_batches_tracked, model.found, logged) == (0, [], {"loss": [0.5]})
    assert torch.equal(batch, torch.ones(2, 3))
    assert model.weight is other
    assert other.grad is not None


def drawn_next(restore):
    restore()
    return random.random(), torch.rand(2).tolist()


def test_iterators_are_named():
    model = Everything()
    model.body.numbers, model.rows = itertools.count(), iter([1, 2])
    assert iterators_in(model) == ["rows", "body.numbers"]
