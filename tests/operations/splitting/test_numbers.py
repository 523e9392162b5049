"""Split operators compute what whole ones do, and take no memory that those do not."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.operations.splitting import split
from lightning_osdp.profiler import LiveBytes
from tests.support.tiers import examples
from tests.support.transposed import Conv1D


def linear(inputs, outputs, has_bias):
    return nn.Linear(inputs, outputs, bias=has_bias)


def conv1d(inputs, outputs, has_bias):
    return Conv1D(outputs, inputs)


def embedding(inputs, outputs, has_bias):
    return nn.Embedding(outputs, inputs, padding_idx=0 if has_bias else None)


class Between(nn.Module):
    """An operator between others, so that its inputs need gradients."""

    def __init__(self, make, inputs, outputs, has_bias, num_slices):
        super().__init__()
        torch.manual_seed(0)
        self.operator = make(inputs, outputs, has_bias)
        self.before = None if make is embedding else nn.Linear(5, inputs)
        self.after = nn.Linear(self.operator.embedding_dim if make is embedding else outputs, 2)
        if num_slices:
            split(self.operator, num_slices)

    def forward(self, x):
        x = x.remainder(self.operator.num_embeddings) if self.before is None else self.before(x).tanh()
        return self.after(self.operator(x).sin())


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}


@examples(40)
@given(data=st.data())
def test_forward_gradients_and_five_steps_equal_the_whole_operators(data):
    make = data.draw(st.sampled_from([linear, linear, conv1d, embedding]))
    inputs, outputs = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20))
    num_slices, has_bias = data.draw(st.integers(1, inputs)), data.draw(st.booleans())
    leading = data.draw(st.lists(st.integers(1, 4), max_size=3)) if make is not conv1d else [2, 3]
    dtype, optimizer, tolerance = data.draw(
        st.sampled_from([(torch.float64, "adamw", 1e-9), (torch.float32, "sgd", 1e-6), (torch.float32, "adamw", 1e-4)])
    )
    models = [Between(make, inputs, outputs, has_bias, k).to(dtype) for k in (None, num_slices)]
    optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in models]
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        if make is embedding:
            x = torch.randint(0, 100, leading, generator=generator)
        else:
            x = torch.randn(*leading, 5, dtype=dtype, generator=generator)
        expected, found = (model(x) for model in models)
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        for model, one in zip(models, optimizers, strict=True):
            one.zero_grad()
            model(x).square().mean().backward()
            if step < 4:
                one.step()
    expected, found = (model.state_dict() for model in models)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
    if make is not embedding:
        torch.testing.assert_close(
            models[1].before.weight.grad, models[0].before.weight.grad, rtol=10 * tolerance, atol=10 * tolerance
        )


@pytest.mark.parametrize("make", [linear, conv1d])
def test_autocast_gives_the_dtypes_that_it_gives_the_whole_operator(make):
    models = [Between(make, 64, 32, has_bias=True, num_slices=k) for k in (None, 4)]
    x = torch.randn(8, 3, 5)
    outputs, gradients = [], []
    for model in models:
        with torch.autocast("cpu", torch.bfloat16):
            y = model.operator(model.before(x).float())
        y.float().sin().sum().backward()
        outputs.append(y)
        gradients.append(model.before.weight.grad)
    assert outputs[1].dtype == outputs[0].dtype == torch.bfloat16
    assert gradients[1].dtype == torch.float32
    torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_computes_the_same(use_reentrant):
    models = [Between(linear, 12, 8, has_bias=True, num_slices=k) for k in (None, 5)]
    x = torch.randn(4, 5)
    for model in models:
        middle = model.before(x).tanh()
        checkpoint(lambda h, model=model: model.operator(h).sin(), middle, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(models[1].before.weight.grad, models[0].before.weight.grad)
    torch.testing.assert_close(models[1].operator.slices[-1].bias.grad, models[0].operator.bias.grad)


@pytest.mark.parametrize("make", [linear, conv1d, embedding])
def test_a_split_operator_may_be_frozen_or_on_the_meta_device(make):
    frozen = split(make(6, 4, has_bias=True).requires_grad_(False), 4)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert not any(parameter.requires_grad for parameter in copy.deepcopy(frozen).parameters())
    with torch.device("meta"):
        operator = split(make(6, 4, has_bias=True), 4)
        x = torch.empty(2, 3, dtype=torch.int64) if make is embedding else torch.empty(2, 3, 6)
        assert operator(x).shape == (2, 3, 6 if make is embedding else 4)
    assert all(parameter.is_meta for parameter in operator.parameters())


@pytest.mark.parametrize(("make", "name"), [(linear, "input"), (conv1d, "x"), (embedding, "input")])
def test_the_input_may_be_given_by_its_name(make, name):
    operator = make(6, 4, has_bias=True)
    x = torch.tensor([[0, 3]]) if make is embedding else torch.randn(2, 3, 6)
    expected = operator(**{name: x})
    torch.testing.assert_close(split(operator, 4)(**{name: x}), expected)


def test_a_wrong_number_of_features_is_refused_where_torch_refuses_it():
    with pytest.raises(RuntimeError, match=r"Expected an input with 6 features, got one of shape \(2, 7\)\."):
        split(nn.Linear(6, 4), 2)(torch.randn(2, 7))
    with pytest.raises(RuntimeError, match=r"Expected an input with 6 features, got one of shape \(\)\."):
        split(nn.Linear(6, 4), 2)(torch.tensor(1.0))


ROWS, INPUTS, OUTPUTS, NUM_SLICES = 64, 512, 256, 4
X_BYTES, Y_BYTES = 4 * ROWS * INPUTS, 4 * ROWS * OUTPUTS


def operator_and_input(num_slices):
    operator = nn.Linear(INPUTS, OUTPUTS)
    x = torch.randn(2, ROWS // 2, INPUTS, requires_grad=True)
    return split(operator, num_slices) if num_slices else operator, x


def forward_bytes(num_slices):
    """Returns the most bytes that forward takes, and the bytes that it leaves."""
    operator, x = operator_and_input(num_slices)
    with LiveBytes("cpu") as live:
        before = live.track([x, *operator.parameters()])
        y = operator(x)
        assert y.requires_grad
        return live.peak_bytes - before, live.current_bytes - before


def backward_bytes(num_slices):
    """Returns the most bytes that backward takes for the gradient of the input."""
    operator, x = operator_and_input(num_slices)
    operator.requires_grad_(False)
    y = operator(x)
    gradient = torch.ones_like(y)
    with LiveBytes("cpu") as live:
        before = live.track([x, gradient, *operator.parameters()])
        y.backward(gradient)
        assert live.current_bytes - before == X_BYTES
        return live.peak_bytes - before


def test_forward_takes_one_partial_result_and_keeps_no_more_than_the_output():
    assert forward_bytes(None) == (Y_BYTES, Y_BYTES)
    assert forward_bytes(NUM_SLICES) == forward_bytes(2 * NUM_SLICES) == (2 * Y_BYTES, Y_BYTES)


def test_backward_takes_one_gradient_of_the_input_and_a_part_of_it():
    assert backward_bytes(None) == X_BYTES
    assert backward_bytes(NUM_SLICES) == X_BYTES + X_BYTES // NUM_SLICES


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("make", [linear, conv1d, embedding])
def test_a_hook_of_what_is_returned_stays_where_that_is_changed_in_place(make, leading):
    """Keeps hooks as a whole operator does: `fully_shard` gathers parameters for backward in such hooks."""
    operator, seen = split(make(4, 3, True), 2), []
    output = operator(torch.ones(leading, dtype=torch.long) if make is embedding else torch.ones(*leading, 4))
    output.register_hook(seen.append)
    output.add_(1.0)
    output.sum().backward()
    assert len(seen) == 1
