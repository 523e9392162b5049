"""The operator calls of a forward, what each module's calls span, and steps that pass through them again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.profiler.tracing.calls import Position, followed, recorded_calls
from tests.profiler.traced import Net, linear


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


def test_what_is_given_by_name_goes_into_an_operator_too():
    calls = calls_of(Net(lambda n, x: n.b(input=n.a(x)), a=linear(), b=linear()))
    assert calls.flows["b"].input_bytes == calls.flows["a"].input_bytes == 2 * 4 * 4
    assert (calls.flows["a"].input_gradient_bytes, calls.flows["b"].input_gradient_bytes) == (0, 2 * 4 * 4)


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


def gained(run, **modules):
    """An operator around others."""
    return Net(run, gain=nn.Parameter(torch.ones(4)), **modules)


def path(net, calls=None):
    """Segments of forward and of backward, in the order in which the step leaves them; the loss is the last one."""
    calls = calls or calls_of(net)
    passed = {False: [], True: []}
    position = Position(calls, lambda: passed[position.in_backward].append(position.now))
    with followed(net, position):
        loss = net(torch.ones(2, 4)).sum()
        position.start_backward()
        loss.backward()
        position.end()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert not any(p._backward_hooks for p in net.parameters())
    return passed[False], passed[True]


def test_backward_passes_through_the_segments_of_forward_in_turn():
    assert path(nn.Sequential(linear(), nn.ReLU(), linear(), linear())) == ([0, 1, 2, 3], [3, 2, 1, 0])


def test_an_operator_called_twice_has_two_segments():
    net = Net(lambda n, x: n.a(n.b(n.a(x))), a=linear(), b=linear())
    assert path(net) == ([0, 1, 2, 3], [3, 2, 1, 0])


def test_the_backward_of_an_operator_around_others_begins_where_it_returned():
    net = Net(
        lambda n, x: n.block(n.first(x)),
        first=linear(),
        block=gained(lambda n, x: n.two(n.one(x * n.gain)) * n.gain, one=linear(), two=linear()),
    )
    assert calls_of(net).sequence == ["first", "block", "block.one", "block.two"]
    # backward of the block's start runs in its first operator's segment, as between any two operators
    assert path(net) == ([0, 1, 2, 3, 4], [4, 3, 2, 0])


def test_the_loss_begins_when_the_last_operator_has_returned_and_not_the_last_to_be_called():
    block = gained(lambda n, x: n.one(x) * n.gain, one=linear())
    seen = []
    net = Net(lambda n, x: n.block(x), block=block)
    calls = calls_of(net)
    position = Position(calls, lambda: None)
    with followed(net, position):
        block.one.register_forward_hook(lambda *_: seen.append(position.now))
        block.register_forward_hook(lambda *_: seen.append(position.now))
        net(torch.ones(2, 4))
    assert seen == [1, 2]


def test_a_module_may_end_after_the_loss_has_begun():
    inner = Net(lambda n, x: F.softmax(n.b(n.a(x)), dim=1), a=linear(), b=linear())
    net = Net(lambda n, x: n.inner(x).log(), inner=inner)
    calls = calls_of(net)
    assert calls.spans["inner"] == [(0, 1)]
    assert path(net, calls) == ([0, 1, 2], [2, 1, 0])


def test_parallel_operators_are_passed_through_backwards():
    net = Net(lambda n, x: n.a(x) + n.b(x) + n.c(x), a=linear(), b=linear(), c=linear())
    assert path(net) == ([0, 1, 2, 3], [3, 2, 1, 0])


def test_what_returns_no_gradient_has_no_backward():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            with torch.no_grad():
                return self.inner(x)

    assert path(nn.Sequential(Frozen(), linear(), linear())) == ([0, 1, 2, 3], [3, 2, 1])
    codes = Net(lambda n, x: torch.cdist(x, n.table).argmin(1), table=nn.Parameter(torch.ones(5, 4)))
    net = Net(lambda n, x: n.head(x) + n.codes(x).unsqueeze(1), codes=codes, head=linear())
    assert path(net) == ([0, 1, 2], [2, 0])


def test_outputs_may_lie_in_containers():
    two = Net(lambda n, x: {"index": torch.arange(2), "out": (n.lin(x), None)}, lin=linear())
    net = Net(lambda n, x: n.last(n.two(n.first(x))["out"][0]), first=linear(), two=two, last=linear())
    assert path(net) == ([0, 1, 2, 3], [3, 2, 1, 0])


def blocks(num, *, reentrant, shared=False):
    """Checkpointed blocks of two operators each, or one such block, called again and again."""
    made = [nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(1 if shared else num)]

    def run(net, x):
        x = net.enter(x)
        for index in range(num):
            x = checkpoint(net.blocks[0 if shared else index], x, use_reentrant=reentrant)
        return x

    return Net(run, enter=linear(), blocks=nn.ModuleList(made))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("reentrant", "backward"),
    [
        # each block from its end: its gradient, run again, undone
        (False, [5, 4, 3, 4, 3, 2, 1, 2, 1, 0]),
        # there is no gradient of what ran without gradients before it has run again
        (True, [5, 3, 4, 3, 1, 2, 1, 0]),
    ],
)
def test_blocks_that_are_run_again_resume_their_segments(reentrant, backward, shared):
    net = blocks(2, reentrant=reentrant, shared=shared)
    assert path(net) == ([0, 1, 2, 3, 4, 5], backward)


def test_a_model_of_which_no_operator_is_called_is_all_loss():
    assert path(Net(lambda n, x: x * n.gain, gain=nn.Parameter(torch.ones(4)))) == ([0], [0])


@pytest.mark.parametrize("num_calls", [1, 2, 5])
def test_a_path_that_differs_stays_within_the_segments(num_calls):
    net = Net(lambda n, x: n.b(x), a=linear(), b=linear())
    net.run = lambda n, x: n.b(n.a(n.a(x)))
    calls = calls_of(net)
    net.run = lambda n, x: F.relu(n.a(x)) if num_calls == 1 else sum(n.b(x) for _ in range(num_calls))
    forward, backward = path(net, calls)
    last_operator = min(num_calls, 3) - 1
    assert sorted(set(forward)) == [*range(last_operator + 1), 3]
    assert (forward[-1], backward[0], backward[-1]) == (3, 3, 0)
    assert set(backward) == {*range(last_operator + 1), 3}
