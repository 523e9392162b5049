"""Bytes saved for backward, worked out by hand. Everything is float32: 4 bytes an element."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.core.affine import Affine
from lightning_osdp.profiler import profile_model
from tests.profiler.traced import Net

LOSS = 4
"""Bytes of the loss itself."""


def profiled(step, batch_size=2, width=8, **modules):
    torch.manual_seed(0)
    return profile_model(Net(step, **modules), torch.randn(batch_size, width))


def saved(step, **modules):
    """Bytes per sample of the operators, their calls together, and of the loss."""
    profile = profiled(step, **modules)
    found = dict.fromkeys((segment.operator for segment in profile.segments[:-1]), 0.0)
    for segment in profile.segments[:-1]:
        found[segment.operator] += segment.saved_bytes.per_sample
        assert segment.saved_bytes.fixed == 0
    assert profile.loss.saved_bytes.fixed in (0, LOSS)
    return found, profile.loss.saved_bytes.per_sample


def test_a_linear_saves_its_input_and_relu_its_output():
    found, _ = saved(
        lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))).sum(), a=nn.Linear(8, 16), b=nn.Linear(16, 32), c=nn.Linear(32, 4)
    )
    # a: its input is the batch, which does not count; relu's output is also b's input, and saved once
    assert found == {"a": 4 * 16, "b": 4 * 32, "c": 0}


def test_what_nothing_has_saved_yet_is_handed_on():
    def step(m, x):
        return m.b(F.gelu(m.a(x))).sum()

    first, second, _ = profiled(step, a=nn.Linear(8, 16), b=nn.Linear(16, 4)).segments
    # gelu saves its input, and b will save what it returns
    assert (first.saved_bytes, first.handed_bytes) == (Affine(0.0, 4 * 16), Affine(0.0, 4 * 16))
    # sum saves nothing
    assert (second.saved_bytes, second.handed_bytes) == (Affine(0.0, 4 * 16), Affine(0.0, 4 * 4))


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

    one = profiled(step, batch_size=4, a=nn.Linear(8, 16), b=nn.Linear(16, 4))
    other = profiled(step, batch_size=batch_size, a=nn.Linear(8, 16), b=nn.Linear(16, 4))
    for a, b in zip(one.segments, other.segments, strict=True):
        assert a.saved_bytes == b.saved_bytes
    assert one.batch_bytes.per_sample == other.batch_bytes.per_sample == 4 * 8


def test_a_checkpointed_block_saves_its_input_only():
    block = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 64), "c": nn.Linear(64, 8)}

    def run(m, x):
        return m.c(torch.tanh(m.b(torch.tanh(x))))

    kept = profiled(lambda m, x: run(m, m.a(x)).sum(), **block)
    assert kept.saved_bytes == Affine(LOSS, 4 * (8 + 64))
    for reentrant in (False, True):
        recomputed = profiled(lambda m, x, r=reentrant: checkpoint(run, m, m.a(x), use_reentrant=r).sum(), **block)
        assert recomputed.saved_bytes == Affine(LOSS, 4 * 8)


def test_recomputing_is_workspace_of_backward():
    block = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 64), "c": nn.Linear(64, 8)}

    def run(m, x):
        return m.c(torch.tanh(m.b(x)))

    recomputed = profiled(lambda m, x: checkpoint(run, m, m.a(x), use_reentrant=False).sum(), **block)
    assert max(segment.backward_workspace_bytes.per_sample for segment in recomputed.segments) >= 4 * 64
    for segment in recomputed.segments:  # what is recomputed lives while gradients are reduced, and is no deficit
        assert segment.settled_bytes is None or segment.settled_bytes.at(2) >= LOSS


def test_parameters_buffers_and_the_batch_are_no_activations():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_buffer("mask", torch.ones(8))
            self.constant = torch.ones(8)

        def forward(self, x):
            return x * self.weight * self.mask * self.constant

    profile = profiled(lambda m, x: m.scaled(x).sum(), scaled=Scaled())
    assert profile.segments[0].saved_bytes == Affine()  # weight's gradient needs the batch, x's none
    assert profile.loss.saved_bytes == Affine(LOSS)


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


def test_a_graph_that_is_dropped_later_in_forward_was_there_until_then():
    def profile_of(*, with_metric):
        def step(m, x):
            metric = torch.tanh(m.a(x)).sum() if with_metric else m.a(x).detach()
            hidden = m.b(x)
            del metric
            return m.c(hidden).sum()

        return profiled(step, a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 8))

    profile, without = profile_of(with_metric=True), profile_of(with_metric=False)
    tanh = 4 * 8  # the output, which tanh saves
    assert [segment.saved_bytes.per_sample for segment in profile.segments] == [0, 0, 4 * 8, 0]
    assert profile.segments[0].handed_bytes.per_sample == tanh
    assert profile.segments[1].forward_workspace_bytes.per_sample == 4 * 8 + tanh
    for dropped, plain in zip(profile.segments[1:], without.segments[1:], strict=True):
        assert dropped.backward_workspace_bytes == plain.backward_workspace_bytes


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
    assert loss == 4 * 8  # tanh's output


def test_what_a_parametrization_saves_is_there_whatever_the_batch():
    weighted = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
    profile = profiled(lambda m, x: m.b(m.a(x)).sum(), a=nn.Linear(8, 8), b=weighted)
    assert [segment.operator for segment in profile.segments] == ["a", "b", "b.parametrizations.weight", ""]
    # the weight that it makes, one norm for each of its rows, and the layer's input
    assert profile.segments[2].saved_bytes == Affine(4 * (8 * 16 + 16), 4 * 8)


def test_workspace_of_a_linear_by_hand():
    profile = profiled(
        lambda m, x: m.b(m.a(x)).sum(), batch_size=4, a=nn.Linear(8, 32, bias=False), b=nn.Linear(32, 16, bias=False)
    )
    b = profile.segments[1]
    # forward: b's output lives beside a's, which is saved
    assert b.forward_workspace_bytes == Affine(0, 4 * 16)
    # backward of b: the gradient of its input, its own being an expanded one; that of its weight is counted elsewhere
    assert 4 * 32 <= b.backward_workspace_bytes.per_sample <= 4 * (32 + 16)
    # once its weight's gradient is there: its input has gone or its gradient is to come, and the loss with its gradient
    assert b.settled_bytes.at(4) == pytest.approx(4 * 4 * 32, abs=2 * LOSS)
    assert b.passed_bytes.at(4) == pytest.approx(4 * 4 * 32, abs=2 * LOSS)  # the gradient of its input


def test_what_is_between_two_operators_is_gone_where_backward_passes_to_the_first():
    profile = profiled(
        lambda m, x: m.b(torch.tanh(m.a(x))).sum(),
        batch_size=4,
        a=nn.Linear(8, 32, bias=False),
        b=nn.Linear(32, 16, bias=False),
    )
    a, b = profile.segments[:2]
    assert a.saved_bytes.at(4) == 4 * 4 * 32  # tanh's output, which is b's input
    # b's gradient is complete: that of b's input is there, the one that tanh makes of it, and tanh's output
    assert b.ending_bytes.at(4) == pytest.approx(3 * 4 * 4 * 32, abs=2 * LOSS)
    assert 4 * 32 <= b.backward_workspace_bytes.per_sample <= 4 * (32 + 16)
    # the gradient of a's output is there, and nothing saved but the batch
    assert b.passed_bytes.at(4) == pytest.approx(4 * 4 * 32, abs=2 * LOSS)


def test_a_gradient_that_waits_for_the_rest_of_it_is_no_workspace():
    wide = nn.Linear(8, 8, bias=False)
    profile = profiled(lambda m, x: m.a(m.b(m.a(x))).sum(), a=wide, b=nn.Linear(8, 8, bias=False))
    weight = 4 * 8 * 8
    b, again = profile.segments[1], profile.segments[2]
    assert b.backward_workspace_bytes.at(2) < weight  # a's lives, from its last call on
    assert again.backward_workspace_bytes.at(2) < weight
    assert profile.segments[0].backward_workspace_bytes.at(2) >= weight  # the gradient that is added to it


class Gained(nn.Module):
    """An operator around others, which works on what they return."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 64), nn.Linear(64, 8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.two(F.relu(self.one(x))) * self.gain


def test_what_an_operator_saves_after_the_ones_inside_it_is_no_workspace_of_its_backward():
    profile = profiled(lambda m, x: m.block(m.first(x)).sum(), first=nn.Linear(8, 8), block=Gained())
    assert [segment.operator for segment in profile.segments] == ["first", "block", "block.one", "block.two", ""]
    assert [segment.saved_bytes.per_sample for segment in profile.segments] == [0, 0, 4 * (8 + 64), 4 * 8, 0]
    # backward begins in the segment that ended the block, with all of it saved; nothing is left for the block's own
    assert profile.segments[1].backward_workspace_bytes == Affine()
    assert profile.segments[3].backward_workspace_bytes.per_sample <= 4 * (64 + 8 + 8)


def test_evaluation_keeps_nothing_for_backward():
    profile = profiled(
        lambda m, x: m.b(torch.tanh(m.a(x))).sum(), batch_size=4, a=nn.Linear(8, 32), b=nn.Linear(32, 16)
    )
    # a's output and what tanh makes of it; then that and b's output
    assert [segment.evaluation_bytes for segment in profile.segments[:-1]] == [
        Affine(0, 4 * (32 + 32)),
        Affine(0, 4 * (32 + 16)),
    ]


def test_a_step_that_needs_gradients_is_taken_to_be_evaluated_as_it_is_trained():
    def step(m, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m.a(x).sum(), x, create_graph=True)
        return slope.pow(2).sum()

    profile = profiled(step, a=nn.Linear(8, 16))
    a, loss = profile.segments
    assert a.evaluation_bytes.at(2) == a.saved_bytes.at(2) + a.forward_workspace_bytes.at(2) > 0
    assert loss.evaluation_bytes.at(2) == profile.saved_bytes.at(2) + loss.forward_workspace_bytes.at(2)


def read(step, **modules):
    """Operators whose parameters backward reads."""
    return {operator.name for operator in profiled(step, **modules).operators if operator.is_read}


def test_backward_reads_no_embedding_and_no_linear_whose_input_needs_no_gradient():
    modules = {"table": nn.Embedding(8, 8), "a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}

    def step(m, x):
        return m.b(F.relu(m.a(x)) + m.table(x.argmax(-1))).sum()

    assert read(step, **modules) == {"b"}
    # a tie is read where the other one is
    modules["b"].weight = modules["table"].weight
    assert read(step, **modules) == {"b", "table"}


def test_backward_reads_what_is_used_elsewhere_or_again_in_views_and_copies():
    modules = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    assert read(lambda m, x: F.linear(m.b(m.a(x)), m.a.weight).sum(), **modules) == {"a", "b"}
    assert read(lambda m, x: m.b(m.a(m.a(x))).sum(), **modules) == {"a", "b"}
    assert read(lambda m, x: (m.a(x) @ m.b.weight[:4].t()).sum() + m.b(x).sum(), **modules) == {"b"}
    assert read(lambda m, x: (m.b(x) @ m.a.weight.double().t().float()).sum() + m.a(x).sum(), **modules) == {"a"}


def test_backward_reads_what_runs_again_and_what_a_function_keeps_by_itself():
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.weight = weight
            return x @ weight.t()

        @staticmethod
        def backward(ctx, gradient):
            return gradient @ ctx.weight, None

    modules = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    again = {"use_reentrant": False}
    assert read(lambda m, x: m.b(checkpoint(lambda y: m.a(y).relu(), x, **again)).sum(), **modules) == {"a", "b"}

    def step(m, x):
        return Keeps.apply(m.b(x), m.a.weight).sum() + m.a(x).sum()

    assert read(step, **modules) == {"a"}
