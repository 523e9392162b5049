"""Where a step is in forward and backward, as the segments that it passes through one after another."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.profiler.tracing.calls import recorded_calls
from lightning_osdp.profiler.tracing.segments import Position, followed


class Net(nn.Module):
    """Modules by name and a forward written as a function of the net and its input."""

    def __init__(self, run, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def linear():
    return nn.Linear(4, 4)


def gained(run, **modules):
    """An operator around others."""
    return Net(run, gain=nn.Parameter(torch.ones(4)), **modules)


def recorded(net):
    with recorded_calls(net) as calls:
        net(torch.ones(2, 4))
    return calls


def path(net, calls=None):
    """Segments of forward and of backward, in the order in which the step leaves them; the loss is the last one."""
    calls = calls or recorded(net)
    passed = {False: [], True: []}
    position = Position(calls, lambda: passed[position.in_backward].append(position.now))
    with followed(dict(net.named_modules()), position, calls):
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
    assert recorded(net).sequence == ["first", "block", "block.one", "block.two"]
    # what the block does before its first operator is undone in that one's segment, as between any two operators
    assert path(net) == ([0, 1, 2, 3, 4], [4, 3, 2, 0])


def test_the_loss_begins_when_the_last_operator_has_returned_and_not_the_last_to_be_called():
    block = gained(lambda n, x: n.one(x) * n.gain, one=linear())
    seen = []
    net = Net(lambda n, x: n.block(x), block=block)
    calls = recorded(net)
    position = Position(calls, lambda: None)
    with followed(dict(net.named_modules()), position, calls):
        block.one.register_forward_hook(lambda *_: seen.append(position.now))
        block.register_forward_hook(lambda *_: seen.append(position.now))
        net(torch.ones(2, 4))
    assert seen == [1, 2]


def test_a_module_may_end_after_the_loss_has_begun():
    inner = Net(lambda n, x: F.softmax(n.b(n.a(x)), dim=1), a=linear(), b=linear())
    net = Net(lambda n, x: n.inner(x).log(), inner=inner)
    calls = recorded(net)
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
    calls = recorded(net)
    net.run = lambda n, x: F.relu(n.a(x)) if num_calls == 1 else sum(n.b(x) for _ in range(num_calls))
    forward, backward = path(net, calls)
    last_operator = min(num_calls, 3) - 1
    assert sorted(set(forward)) == [*range(last_operator + 1), 3]
    assert (forward[-1], backward[0], backward[-1]) == (3, 3, 0)
    assert set(backward) == {*range(last_operator + 1), 3}
