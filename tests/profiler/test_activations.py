"""Bytes saved for backward, worked out by hand. Everything is float32: 4 bytes an element."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.profiler import profile_model


class Steps(nn.Module):
    """A model and the step to take on a batch of shape (b, 8)."""

    def __init__(self, step, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.step = step

    def training_step(self, batch, batch_idx):
        return self.step(self, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def profiled(step, batch_size=2, width=8, **modules):
    torch.manual_seed(0)
    profile = profile_model(Steps(step, **modules), torch.randn(batch_size, width))
    return {operator.name: operator for operator in profile}, profile


def saved(step, **modules):
    operators, profile = profiled(step, **modules)
    found = {name: operator.activation_bytes_per_sample for name, operator in operators.items()}
    return found, profile.loss_activation_bytes_per_sample


def test_a_linear_saves_its_input_and_relu_its_output():
    found, _ = saved(
        lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))).sum(), a=nn.Linear(8, 16), b=nn.Linear(16, 32), c=nn.Linear(32, 4)
    )
    # a: its input is the batch, which does not count; relu's output is also b's input, and saved once
    assert found == {"a": 4 * 16, "b": 4 * 32, "c": 0}


def test_layer_norm_saves_its_input_mean_and_deviation():
    found, _ = saved(lambda m, x: m.b(m.norm(m.a(x))).sum(), a=nn.Linear(8, 8), norm=nn.LayerNorm(8), b=nn.Linear(8, 8))
    assert found == {"a": 0, "norm": 4 * (8 + 1 + 1), "b": 4 * 8}


def test_the_loss_has_a_part_of_its_own():
    found, loss = saved(lambda m, x: F.mse_loss(m.a(x), x), batch_size=4, a=nn.Linear(8, 8))
    assert found == {"a": 0}
    # the prediction; and the loss itself, whose storage torch allocates before it takes the mean
    assert loss in (4 * 8 + 1, 4 * 8 * 2)


def test_what_training_step_returns_lives_until_backward_is_over():
    def step(m, x):
        logits = m.a(x)
        return {"loss": logits.sum(), "logits": logits}

    _, without = saved(lambda m, x: step(m, x)["loss"], a=nn.Linear(8, 8))
    _, with_logits = saved(step, a=nn.Linear(8, 8))
    assert with_logits - without == 4 * 8


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_bytes_per_sample_do_not_depend_on_the_batch(batch_size):
    def step(m, x):
        return F.gelu(m.b(F.gelu(m.a(x)))).mean()

    _, one = profiled(step, batch_size=4, a=nn.Linear(8, 16), b=nn.Linear(16, 4))
    _, other = profiled(step, batch_size=batch_size, a=nn.Linear(8, 16), b=nn.Linear(16, 4))
    for a, b in zip(one, other, strict=True):
        assert a.activation_bytes_per_sample == b.activation_bytes_per_sample
    assert one.batch_bytes_per_sample == other.batch_bytes_per_sample == 4 * 8


def test_a_checkpointed_block_saves_its_input_only():
    block = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 64), "c": nn.Linear(64, 8)}

    def run(m, x):
        return m.c(torch.tanh(m.b(torch.tanh(x))))

    loss = 4 / 2
    _, kept = profiled(lambda m, x: run(m, m.a(x)).sum(), **block)
    assert kept.activation_bytes_per_sample == 4 * (8 + 64) + loss
    for reentrant in (False, True):
        _, recomputed = profiled(lambda m, x, r=reentrant: checkpoint(run, m, m.a(x), use_reentrant=r).sum(), **block)
        assert recomputed.activation_bytes_per_sample == 4 * 8 + loss


def test_recomputing_is_workspace_of_backward():
    block = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 64), "c": nn.Linear(64, 8)}

    def run(m, x):
        return m.c(torch.tanh(m.b(x)))

    operators, _ = profiled(lambda m, x: checkpoint(run, m, m.a(x), use_reentrant=False).sum(), **block)
    assert max(operator.backward_workspace_bytes_per_sample for operator in operators.values()) >= 4 * 64


def test_parameters_buffers_and_the_batch_are_no_activations():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_buffer("mask", torch.ones(8))
            self.constant = torch.ones(8)

        def forward(self, x):
            return x * self.weight * self.mask * self.constant

    found, loss = saved(lambda m, x: m.scaled(x).sum(), scaled=Scaled())
    assert found == {"scaled": 4 * 8 * 0}  # weight's gradient needs the batch, x's none
    assert loss == 4 / 2  # the loss itself


def test_a_tensor_saved_twice_counts_once():
    found, _ = saved(
        lambda m, x: (m.b(h := m.a(x)) + m.c(h)).sum(), a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8)
    )
    assert sum(found.values()) == 4 * 8


def test_a_graph_that_the_loss_does_not_need_is_not_kept():
    def step(m, x):
        hidden = m.a(x)
        torch.tanh(m.b(hidden * 2)).sum().item()  # a metric, computed with gradients by accident
        return hidden.sum()

    found, _ = saved(step, a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    assert found == {"a": 0, "b": 0}


def test_sparse_tensors_do_not_stop_it():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", torch.eye(2).to_sparse())
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            return torch.sparse.mm(self.adjacency, self.lin(x))

    found, _ = saved(lambda m, x: m.graph(x).sum(), graph=Graph())
    assert found == {"graph.lin": 0}


def test_the_loss_begins_after_the_last_call_of_a_module_called_twice():
    found, loss = saved(lambda m, x: m.a(m.b(m.a(x))).tanh().sum(), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    assert found == {"a": 4 * 8, "b": 4 * 8}
    assert loss == 4 * 8 + 4 / 2  # tanh's output and the loss itself


def test_workspace_of_a_linear_by_hand():
    operators, _ = profiled(
        lambda m, x: m.b(m.a(x)).sum(), batch_size=4, a=nn.Linear(8, 32, bias=False), b=nn.Linear(32, 16, bias=False)
    )
    # forward: b's output lives beside a's, which is saved
    assert operators["b"].forward_workspace_bytes_per_sample == 4 * 16
    # backward of b: the gradient of its input, its own being an expanded one; that of its weight is counted elsewhere
    assert 4 * 32 <= operators["b"].backward_workspace_bytes_per_sample <= 4 * (32 + 16) + 4
