"""Structure only: how long things take is the machine's business."""

import pytest
import torch
from torch import nn

from lightning_osdp.profiler.timing import step_time
from lightning_osdp.profiler.timing.step_time import Seconds, time_step
from lightning_osdp.profiler.tracing.calls import recorded_calls

CPU = torch.device("cpu")


def timed(model, run, **options):
    with recorded_calls(model) as calls:
        run()
    return calls, time_step(model, calls, CPU, run, **options)


def test_every_segment_is_timed():
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(3)))
    calls, seconds = timed(model, lambda: model(torch.ones(2, 4)).sum())
    assert len(seconds.forward_s) == len(seconds.backward_s) == len(calls.sequence) + 1 == 7
    assert all(s > 0 for s in (*seconds.forward_s, *seconds.backward_s))
    assert seconds.total_s == pytest.approx(sum(seconds.forward_s) + sum(seconds.backward_s))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Odd(nn.Module):
    """Takes keywords and integers, draws dropout, writes to its input, returns a tuple in a dict, counts its calls."""

    def __init__(self):
        super().__init__()
        self.table, self.dropout, self.calls = nn.Parameter(torch.randn(5, 4)), nn.Dropout(0.5), 0

    def forward(self, tokens, *, mask=None, scale=1.0, x):
        self.calls += 1
        x += self.table[tokens]
        return {"out": (self.dropout(x) * scale, tokens), "mask": mask}


def test_odd_operators_run_as_they_are_and_once_a_run():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.odd = nn.Linear(4, 4), Odd()

        def forward(self, x):
            y = self.lin(x)
            before = y.detach().clone()
            found = self.odd(torch.tensor([0, 3]), mask=None, scale=2, x=y)
            assert torch.equal(y, before + self.odd.table[torch.tensor([0, 3])])  # written to once
            return found["out"][0].sum()

    model, runs = Model(), []
    _, seconds = timed(model, lambda: runs.append(1) or model(torch.ones(2, 4)))
    assert len(seconds.forward_s) == 3
    assert model.odd.calls == len(runs)


def test_an_operator_without_gradients_takes_no_backward():
    model = nn.Linear(4, 4)
    model.inner = nn.Linear(4, 4)
    grad_modes = []
    model.inner.register_forward_hook(lambda *_: grad_modes.append(torch.is_grad_enabled()))

    def run():
        with torch.no_grad():
            x = model.inner(torch.ones(2, 4))
        return model(x).sum()

    _, seconds = timed(model, run)
    assert len(seconds.forward_s) == 2  # the root's own call begins none
    assert seconds.forward_s[0] > 0
    assert seconds.backward_s[0] == 0
    assert grad_modes
    assert not any(grad_modes)


def test_an_operator_that_returns_no_gradient_is_timed():
    class Nearest(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(5, 4))

        def forward(self, x):
            return torch.cdist(x, self.codes).argmin(1)

    model = nn.ModuleDict({"nearest": Nearest(), "table": nn.Embedding(5, 4)})
    _, seconds = timed(model, lambda: model["table"](model["nearest"](torch.ones(2, 4))).sum())
    assert all(s > 0 for s in seconds.forward_s)
    assert [s > 0 for s in seconds.backward_s] == [False, True, True]


def test_the_step_is_timed_on_fresh_gradients():
    model = nn.Linear(4, 4)
    timed(model, lambda: model(torch.ones(2, 4)).sum())
    assert torch.equal(model.bias.grad, torch.full((4,), 2.0))


def test_a_step_that_takes_long_is_repeated_once_after_it_has_warmed_up(monkeypatch):
    model, runs, told = nn.Linear(4, 4), [], []
    monkeypatch.setattr(step_time, "_REPEAT_BUDGET_S", 0.0)

    def run():
        runs.append(1)
        return model(torch.ones(2, 4)).sum()

    timed(model, run, stage="timing", progress=lambda stage, detail: told.append((stage, detail)))
    assert len(runs) == 5  # one of them to record, two with hooks, two without
    assert told == [("timing", "run 1 of 6"), ("timing", "run 2 of 6")]


def test_the_total_is_that_of_the_fastest_run_on_the_slowest_rank():
    # with hooks and without, in turns
    model, others = nn.Linear(4, 4), iter([9.0, 9.0, 2.0, 6.0, 2.0, 3.0, 2.0, 7.0, 2.0, 4.0, 2.0, 5.0])

    def together(work, *, stage):
        assert stage == "timing"
        return [work(), (next(others), 0.0)]

    _, seconds = timed(model, lambda: model(torch.ones(2, 4)).sum(), together=together)
    assert seconds.total_s == pytest.approx(3.0)
    assert next(others, None) is None


def test_the_first_run_without_hooks_counts_for_one_with_hooks_has_warmed_up(monkeypatch):
    monkeypatch.setattr(step_time, "_REPEAT_BUDGET_S", 0.0)
    model, others = nn.Linear(4, 4), iter([9.0, 2.0, 9.0, 5.0])

    def together(work, *, stage):
        return [work(), (next(others), 1.0)]

    _, seconds = timed(model, lambda: model(torch.ones(2, 4)).sum(), together=together)
    assert seconds.total_s == pytest.approx(2.0)


def test_all_ranks_stop_where_one_has_taken_long_or_has_too_little_memory():
    model, runs = nn.Linear(4, 4), []

    def beside(other):
        return lambda work, *, stage: [runs.append(1) or work(), other]

    def run():
        return model(torch.ones(2, 4)).sum()

    _, seconds = timed(model, run, together=beside((1.0, 1e6)))
    assert (len(runs), seconds.total_s) == (4, pytest.approx(1.0))
    assert timed(model, run, together=beside(None))[1] is None
    assert len(runs) == 5


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")]
)
def test_a_rank_with_too_little_memory_tells_the_others(error):
    model, told = nn.Linear(4, 4), []

    def run():
        if not model.training:
            raise error
        return model(torch.ones(2, 4)).sum()

    def together(work, *, stage):
        model.eval()
        told.append(work())
        return [*told, (1.0, 1.0)]

    assert timed(model, run, together=together)[1] is None
    assert told == [None]


def test_segments_have_their_shares_of_the_total():
    runs = [Seconds((1.0, 3.0), (2.0, 4.0)), Seconds((2.0, 2.0), (1.0, 7.0))]
    seconds = step_time.shared_out(runs, plain_s=10.0, total_s=10.0)
    assert seconds.total_s == pytest.approx(10.0)
    # shares of 1 + 2 + 1 + 4
    assert seconds.forward_s == pytest.approx((1.25, 2.5))
    assert seconds.backward_s == pytest.approx((1.25, 5.0))


def test_what_hooks_take_is_left_out_of_every_segment():
    runs = [Seconds((2.0, 3.0), (0.0, 5.0))]  # the first has no backward
    seconds = step_time.shared_out(runs, plain_s=7.0, total_s=14.0)
    assert seconds.forward_s == pytest.approx((2.0, 4.0))
    assert seconds.backward_s == pytest.approx((0.0, 8.0))


def test_a_segment_that_is_all_hooks_keeps_a_little():
    seconds = step_time.shared_out([Seconds((1.0, 8.0), (0.0, 1.0))], plain_s=4.0, total_s=6.2)
    assert seconds.forward_s == pytest.approx((0.1, 6.0))
    assert seconds.backward_s == pytest.approx((0.0, 0.1))
