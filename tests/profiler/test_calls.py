"""The sequence of operator calls in one forward, and which part of it each module's calls span."""

import pytest
import torch
from torch import nn

from lightning_osdp.profiler.tracing.calls import recorded_calls


def linear():
    return nn.Linear(4, 4)


class Net(nn.Module):
    """Modules by name and a forward written as a function of the net and its input."""

    def __init__(self, run, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def calls_of(model):
    with recorded_calls(model) as calls:
        model(torch.ones(2, 4))
    return calls


def test_every_call_of_an_operator_begins_a_segment():
    calls = calls_of(Net(lambda n, x: n.a(n.c(n.b(n.c(x)))), a=linear(), b=linear(), c=linear()))
    assert calls.sequence == ["c", "b", "c", "a"]
    assert calls.spans == {"c": [(0, 0), (2, 2)], "b": [(1, 1)], "a": [(3, 3)]}
    assert calls.last == "a"


def test_a_container_spans_the_calls_inside_it():
    block = nn.Sequential(linear(), nn.ReLU(), linear())
    calls = calls_of(Net(lambda n, x: n.block(n.head(n.block(x))), block=block, head=linear()))
    assert calls.sequence == ["block.0", "block.2", "head", "block.0", "block.2"]
    assert calls.spans["block"] == [(0, 1), (3, 4)]
    assert calls.spans["block.1"] == [(0, 0), (3, 3)]  # within the segment that runs


def test_a_module_without_operators_lies_in_the_segment_that_runs():
    calls = calls_of(Net(lambda n, x: n.after(n.a(n.before(x))), before=nn.ReLU(), a=linear(), after=nn.ReLU()))
    assert calls.sequence == ["a"]
    assert calls.spans == {"before": [(0, 0)], "a": [(0, 0)], "after": [(0, 0)]}


def test_an_operator_around_others_begins_a_segment_and_spans_theirs():
    inner = Net(lambda n, x: n.two(n.one(x)) * n.gain, one=linear(), two=linear(), gain=nn.Parameter(torch.ones(4)))
    calls = calls_of(Net(lambda n, x: n.head(n.inner(x)), inner=inner, head=linear()))
    assert calls.sequence == ["inner", "inner.one", "inner.two", "head"]
    assert calls.spans["inner"] == [(0, 2)]


def test_the_call_that_ends_last_may_have_begun_early():
    inner = Net(lambda n, x: n.one(x) * n.gain, one=linear(), gain=nn.Parameter(torch.ones(4)))
    assert calls_of(Net(lambda n, x: n.inner(x), inner=inner)).last == "inner"


def test_parameters_of_the_root_begin_no_segment():
    calls = calls_of(Net(lambda n, x: n.a(x) * n.gain, a=linear(), gain=nn.Parameter(torch.ones(4))))
    assert calls.sequence == ["a"]


def test_what_is_never_called_begins_no_segment():
    holder = Net(lambda n, x: x + n.values[0], values=nn.ParameterList([torch.ones(4)]))
    calls = calls_of(Net(lambda n, x: n.a(n.holder(x)), a=linear(), holder=holder, idle=linear()))
    assert calls.sequence == ["a"]
    assert set(calls.spans) == {"holder", "a"}


def test_a_module_under_two_names_is_called_by_the_first():
    shared = linear()
    calls = calls_of(Net(lambda n, x: n.two(n.one(x)), one=nn.Sequential(shared), two=nn.Sequential(shared)))
    assert calls.sequence == ["one.0", "one.0"]
    assert calls.spans["one.0"] == [(0, 0), (1, 1)]


def test_a_model_of_which_nothing_is_called_has_one_segment():
    calls = calls_of(Net(lambda n, x: x * n.gain, gain=nn.Parameter(torch.ones(4))))
    assert (calls.sequence, calls.spans, calls.last) == ([], {}, "")


def test_recording_leaves_no_hooks_even_after_an_error():
    net = Net(lambda n, x: n.lin(x) / {}["missing"], lin=linear())
    with pytest.raises(KeyError), recorded_calls(net):
        net(torch.ones(2, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


class WithLoss(nn.Module):
    """Returns the loss, or a part of what its head returns."""

    def __init__(self, returns):
        super().__init__()
        self.inner, self.head, self.returns = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4), returns

    def forward(self, x):
        return self.returns(self.head(self.inner(x)))


@pytest.mark.parametrize(
    ("returns", "last"),
    [(torch.Tensor.square, 2), (lambda y: y.square().sum(), 2), (lambda y: y, 1), (lambda y: y[:, 0], 1)],
)
def test_a_module_that_computes_after_its_last_operator_ends_in_the_loss(returns, last):
    model = nn.ModuleDict({"net": nn.Sequential(WithLoss(returns))})
    with recorded_calls(model) as calls:
        model["net"](torch.ones(2, 4)).sum()
    assert calls.spans_of("net") == calls.spans_of("net.0") == ((0, last),)
    assert calls.spans_of("net.0.inner") == calls.spans_of("net.0.inner.0") == ((0, 0),)
    assert calls.spans_of("net.0.head") == ((1, 1),)


def test_of_several_calls_the_last_one_ends_in_the_loss():
    model = nn.ModuleDict({"net": WithLoss(torch.Tensor.square)})
    with recorded_calls(model) as calls:
        model["net"](model["net"](torch.ones(2, 4)))
    assert calls.spans_of("net") == ((0, 1), (2, 4))
