"""A step is followed on fake tensors, or on real ones where the model does not allow that, to the same result."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler.step.run_step import StepRunner
from lightning_osdp.profiler.tracing.trace import trace_step, trace_whole
from tests.profiler.entangled_models import MODELS
from tests.profiler.traced import DEPTH, Net, linear

CPU = torch.device("cpu")
READS_VALUES = {"SkipsLayers"}
SCALARS = {"Bags": 8}
"""Bytes that kernels keep and their descriptions leave out."""


def step_of(model, batch=None, batch_size=4, run=None):
    batch = model.batch() if batch is None else batch
    return StepRunner(model, batch, batch_size, run or (lambda batch: model.training_step(batch, 0)), CPU)


@pytest.mark.parametrize("name", sorted(set(MODELS) - READS_VALUES))
def test_fake_tensors_tell_what_real_ones_do(name):
    model = MODELS[name]()
    step = step_of(model, batch_size=len(model.batch()["x"]))
    fake, real = trace_whole(step, step.on_fake_tensors), trace_whole(step, step.on_real_tensors)
    assert fake.calls == real.calls
    assert [*fake.activations] == [*real.activations]
    for size, parts in real.activations.items():
        for index, (expected, found) in enumerate(zip(parts, fake.activations[size], strict=True)):
            for kind, num_bytes in vars(expected).items():
                if isinstance(num_bytes, tuple):  # tensors, one by one
                    assert getattr(found, kind) == num_bytes, (size, index, kind)
                    continue
                slack = SCALARS.get(name, 0) if num_bytes else 0
                assert getattr(found, kind) == pytest.approx(num_bytes, abs=slack), (size, index, kind)


def test_a_step_on_fake_tensors_computes_nothing(monkeypatch):
    net = Net(lambda n, x: n.a(x).sum(), a=nn.Linear(4, 4))
    with_real = []
    monkeypatch.setattr(StepRunner, "on_real_tensors", lambda *_: with_real.append(1))
    trace = trace_step(step_of(net, torch.ones(4, 4)))
    assert not with_real
    assert trace.calls.sequence == ["a"]
    assert [*trace.activations] == [4, 2]
    assert [len(parts) for parts in trace.activations.values()] == [2, 2]
    assert net.a.weight.grad is None


def test_a_step_that_reads_values_is_traced_on_real_tensors_and_says_why(caplog):
    caplog.set_level(logging.INFO, logger="lightning_osdp")
    net = Net(lambda n, x: n.a(x).sum() * n.a.weight.sum().item(), a=nn.Linear(4, 4))
    trace = trace_step(step_of(net, torch.ones(4, 4)))
    assert [*trace.activations] == [4, 2]
    assert "the step is traced on real tensors, for on fake ones it fails: DataDependentOutputException" in caplog.text


def on_meta(run):
    with torch.device("meta"):
        return Net(run, a=nn.Linear(4, 4))


def test_a_value_that_a_model_without_values_reads_is_taken_as_one(caplog):
    caplog.set_level(logging.INFO, logger="lightning_osdp")
    seen = []
    net = on_meta(lambda n, x: n.a(x).sum() * (seen.append(n.a.weight.sum().item()) or 1))
    assert [*trace_step(step_of(net, torch.ones(4, 4))).activations] == [4, 2]
    assert set(seen) == {1.0}
    assert "reads a value, which a fake tensor does not have; it is taken as 1." in caplog.text


def test_a_model_without_values_whose_shapes_depend_on_them_is_refused():
    net = on_meta(lambda n, x: (y := n.a(x))[y > 0].sum())
    text = (
        r"^Expected a model on the meta device to run one training step without the values of its parameters, but it"
        r" does not: .*Let training_step read no values, or create the model on a real device\.$"
    )
    with pytest.raises(ProfileError, match=text):
        trace_step(step_of(net, torch.ones(4, 4)))


@pytest.mark.parametrize("reads_values", [False, True])
def test_a_step_of_one_size_is_followed_at_that_size(caplog, reads_values):
    def run(net, x):
        return net.a(x).view(4, 4).sum() * (net.a.weight.sum().item() if reads_values else 1)

    trace = trace_step(step_of(Net(run, a=nn.Linear(4, 4)), torch.ones(4, 4)))
    assert [*trace.activations] == [4]
    assert "does not run on 2 samples (shape '[4, 4]' is invalid for input of size 8)" in caplog.text


def test_what_is_wrong_with_the_loss_is_said_at_once():
    net = Net(lambda n, x: n.a(x), a=nn.Linear(4, 4))
    with pytest.raises(ProfileError, match=r"^Expected the loss to be a scalar"):
        trace_step(step_of(net, torch.ones(4, 4)))


def test_an_error_of_the_step_itself_is_the_users():
    net = Net(lambda n, x: n.missing(x), a=nn.Linear(4, 4))
    with pytest.raises(AttributeError, match="missing"):
        trace_step(step_of(net, torch.ones(4, 4)))


@pytest.mark.parametrize("name", sorted(READS_VALUES))
def test_a_path_drawn_at_random_is_the_same_in_every_run(name):
    model = MODELS[name]()
    trace = trace_step(step_of(model))
    assert all(len(parts) == len(trace.calls.sequence) + 1 for parts in trace.activations.values())
    totals = [sum(part.saved_bytes for part in parts) for parts in trace.activations.values()]
    assert totals[1] < totals[0]


def test_frozen_parameters_and_evaluation_modules_are_followed_too():
    frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False).eval()
    net = Net(lambda n, x: F.mse_loss(n.b(n.frozen(x)), x), frozen=frozen, b=nn.Linear(4, 4))
    trace = trace_step(step_of(net, torch.ones(4, 4)))
    assert trace.calls.sequence == ["frozen.0", "frozen.1", "b"]
    assert [part.settled_bytes is None for part in trace.activations[4]] == [True, True, False, True]


def doubled(x):
    return 2 * torch.tanh(x)


@pytest.mark.parametrize("reads_values", [False, True])
def test_a_function_that_is_compiled_whole_is_followed_as_eager_code(reads_values):
    def followed(function):
        def run(net, x):
            for block in net.blocks:
                x = function(block(x))
            return x.sum() * (net.blocks[0].weight.sum().item() if reads_values else 1)

        net = Net(run, blocks=nn.ModuleList([linear() for _ in range(DEPTH)]))
        return trace_step(step_of(net, torch.ones(4, 4)))

    compiled, eager = followed(torch.compile(doubled, backend="eager", fullgraph=True)), followed(doubled)
    assert compiled.calls == eager.calls
    assert compiled.activations == eager.activations
    assert bool(compiled.short.cuts) is not reads_values


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("num_blocks", [1, DEPTH])
def test_an_operation_that_calls_functions_of_the_models_is_refused(num_blocks):
    def run(net, x):
        for block in net.blocks:
            x = block(x).view(4, 1, 2, 4)
            x = flex_attention(x, x, x).view(4, 2, 4)
        return net.head(x).sum()

    blocks = nn.ModuleList([linear().requires_grad_(False) for _ in range(num_blocks)])  # on CPU it has no backward
    net = Net(run, blocks=blocks, head=linear())
    text = (
        r"^Expected a training step of operations whose cost their shapes tell, got flex_attention, .* FSDPStrategy\.$"
    )
    with pytest.raises(ProfileError, match=text):
        trace_step(step_of(net, torch.ones(4, 2, 4)))
