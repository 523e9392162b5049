"""Structure only: how long things take is the machine's business."""

import torch
from torch import nn

from lightning_osdp.profiler.calls import recorded_calls
from lightning_osdp.profiler.operators import find_operators
from lightning_osdp.profiler.timing import Seconds, time_operators, time_step

CPU = torch.device("cpu")


def timed(model, run):
    with recorded_calls(model) as calls:
        run()
    operators = find_operators(model, calls)
    return operators, time_operators(operators, CPU, run)


def test_every_leaf_is_timed_once_by_signature():
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(3)))
    x = torch.ones(2, 4, requires_grad=True)
    calls = []
    model[0][1].register_forward_pre_hook(lambda *_: calls.append(1))
    operators, found = timed(model, lambda: model(x))
    assert set(found) == {operator.signature for operator in operators}
    assert len(found) == 2
    assert all(seconds.forward_s >= 0 and seconds.backward_s >= 0 for seconds in found.values())
    assert len(calls) == 2  # replays call forward itself, past the hooks
    assert x.grad is None


def test_containers_are_not_timed():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.lin = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x) * self.gain

    model = nn.Sequential(Scaled())
    operators, found = timed(model, lambda: model(torch.ones(2, 4)))
    assert [operator.name for operator in operators if operator.signature in found] == ["0.lin"]


class Odd(nn.Module):
    """Takes keywords and integers, draws dropout, writes to its input, returns a tuple in a dict, counts its calls."""

    def __init__(self):
        super().__init__()
        self.table, self.dropout, self.calls = nn.Parameter(torch.randn(5, 4)), nn.Dropout(0.5), 0

    def forward(self, tokens, *, mask=None, scale=1.0, x):
        self.calls += 1
        x += self.table[tokens]
        return {"out": (self.dropout(x) * scale, tokens), "mask": mask}


def test_odd_operators_are_replayed_on_copies_of_their_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.odd = nn.Linear(4, 4), Odd()

        def forward(self, x):
            y = self.lin(x)
            before = y.detach().clone()
            found = self.odd(torch.tensor([0, 3]), mask=None, scale=2, x=y)
            assert torch.equal(y, before + self.odd.table[torch.tensor([0, 3])])  # written to once, not once a replay
            return found["out"][0]

    model = Model()
    operators, found = timed(model, lambda: model(torch.ones(2, 4)))
    assert set(found) == {operator.signature for operator in operators}
    assert model.odd.table.grad is None


def test_an_operator_without_gradients_is_replayed_without():
    model, grad_modes = nn.Linear(4, 4), []

    def run():
        with torch.no_grad():
            model.inner(torch.ones(2, 4))

    model.inner = nn.Linear(4, 4)
    model.inner.register_forward_hook(lambda *_: None)
    forward = model.inner.forward
    model.inner.forward = lambda x: grad_modes.append(torch.is_grad_enabled()) or forward(x)
    _, found = timed(model, run)
    assert len(found) == 1
    assert not any(grad_modes)


def test_an_operator_that_returns_no_gradient_is_timed():
    class Nearest(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(5, 4))

        def forward(self, x):
            return torch.cdist(x, self.codes).argmin(1)

    model = nn.Sequential(Nearest())
    _, found = timed(model, lambda: model(torch.ones(2, 4)))
    assert len(found) == 1


def test_the_whole_step_is_timed_on_fresh_gradients():
    model = nn.Linear(4, 4)
    seconds = time_step(model, CPU, lambda: model(torch.ones(2, 4)).sum())
    assert seconds.total_s == seconds.forward_s + seconds.backward_s >= 0
    assert torch.equal(model.bias.grad, torch.full((4,), 2.0))


def test_seconds_add_up():
    assert Seconds(1.0, 2.0).total_s == 3.0
