"""Micro-batches whose memory runs out, on a rank that has no others; ranks together are in test_race.py."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import nn

from lightning_osdp.errors import CalledOffError, ConfigurationError, OSDPError
from lightning_osdp.planner.scheduler import Racer
from lightning_osdp.strategy import second_try
from lightning_osdp.strategy.racing import Racing
from lightning_osdp.strategy.second_try import SecondTries, run_or_fall_back
from tests.support.plans import bare_plan


class Sharded:
    """A model that notes what is asked of it; others come when they are called off, or do not."""

    def __init__(self, *, are_called_off=True):
        self.asked, self.are_called_off = [], are_called_off
        self.plan = None

    def meeting(self):
        return nullcontext()

    def call_off(self):
        return self.are_called_off

    def forget_step(self):
        self.asked.append("forget")

    def copy_gradients(self):
        return lambda: self.asked.append("gradients")

    def place_in_step(self):
        return "forward of 'body'"

    def accumulating(self):
        self.asked.append("accumulate")
        return nullcontext()

    def use(self, plan, **_):
        raise ConfigurationError("it holds gradients.")


class Step:
    """A micro-batch that fails at first, after it has drawn a random number and changed its module."""

    def __init__(self, error):
        self.errors, self.module, self.drawn = [error], nn.BatchNorm1d(2), []

    def __call__(self):
        self.module(torch.ones(2, 2))
        self.drawn.append(float(torch.rand(())))
        if self.errors:
            raise self.errors.pop()
        return "loss"


def run(step, sharded, *, is_first=False, accumulates=False):
    loops = SimpleNamespace(epoch_loop=SimpleNamespace(_results={}), _should_accumulate=lambda: accumulates)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(lightning_module=step.module, fit_loop=loops, strategy=strategy, callbacks=[])
    return run_or_fall_back(step, trainer, sharded, (), is_first=is_first, fall_back=sharded.asked.append)


WHY = "rank 0 ran out of memory in forward of 'body'"


@pytest.mark.parametrize(
    ("is_first", "accumulates", "asked"),
    [(True, True, ["forget", WHY, "accumulate"]), (False, False, ["forget", "gradients", WHY])],
)
def test_all_is_as_before_the_first_try(is_first, accumulates, asked):
    step, sharded = Step(torch.OutOfMemoryError("nothing is left")), Sharded()
    assert run(step, sharded, is_first=is_first, accumulates=accumulates) == "loss"
    assert sharded.asked == asked
    assert step.drawn[0] == step.drawn[1]
    assert step.module.num_batches_tracked == 1


def test_a_rank_that_is_called_off_is_told_who_has_no_memory(monkeypatch):
    monkeypatch.setattr(second_try, "all_gather_values", lambda own: [own, ("backward", own[1])])
    step, sharded = Step(CalledOffError("off")), Sharded()
    assert run(step, sharded) == "loss"
    assert sharded.asked == ["forget", "gradients", "rank 1 ran out of memory in backward"]


@pytest.mark.parametrize(
    ("error", "are_called_off"), [(ValueError("other"), True), (torch.OutOfMemoryError("nothing is left"), False)]
)
def test_other_errors_and_shortages_for_which_ranks_do_not_meet_end_training(error, are_called_off):
    step, sharded = Step(error), Sharded(are_called_off=are_called_off)
    with pytest.raises(type(error), match=str(error)):
        run(step, sharded)
    assert sharded.asked == []


def test_ranks_that_have_entered_different_collectives_do_not_go_on(monkeypatch):
    monkeypatch.setattr(second_try, "collectives_by_group", lambda: {"all": 7, "own": 3})
    monkeypatch.setattr(second_try, "all_gather_values", lambda own: [own, ("", {"all": 7, "another": 2})])
    assert run(Step(torch.OutOfMemoryError("nothing is left")), Sharded()) == "loss"
    monkeypatch.setattr(second_try, "all_gather_values", lambda own: [own, ("", {"all": 8})])
    sharded = Sharded()
    with pytest.raises(OSDPError) as raised:
        run(Step(torch.OutOfMemoryError("nothing is left")), sharded)
    assert str(raised.value) == (
        "Rank 0 ran out of memory in forward of 'body' under a plan that is tried, when other ranks had begun a"
        " collective that it has not come to, as code of yours may have in forward: the step cannot be taken again."
        " OSDPStrategy(race=False, longer_batches=False) tries no plans, and a lower memory_limit leaves more room."
    )
    assert sharded.asked == []


class Made(Closure):
    """Closure of a micro-batch whose loss is given."""

    def closure(self):
        return self._step_fn()


def test_a_batch_is_freed_with_its_micro_batch_and_waits_for_no_garbage_collection():
    tries, batch = SecondTries(SimpleNamespace(sharded=None)), torch.ones(3)
    gc.disable()
    try:
        made = tries._make_closure(None, lambda batch: Made(partial(torch.sum, batch)), batch)
        batch = weakref.ref(batch)
        assert batch() is not None
        del made
        assert batch() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("hands_over", [False, True])
def test_micro_batches_in_which_weights_may_change_have_no_second_try(monkeypatch, hands_over):
    def run(micro_batch, *_, fall_back, **__):
        fall_back("why")
        return f"again: {micro_batch()}"

    monkeypatch.setattr(second_try, "run_or_fall_back", run)
    tries = SecondTries(SimpleNamespace(sharded=SimpleNamespace(hands_gradients_over=hands_over)))
    made = tries._make_closure(None, lambda: Made(lambda: "loss"))
    assert made.closure() == "loss"
    fallen = []
    tries.fall_back = fallen.append
    assert made.closure() == ("loss" if hands_over else "again: loss")
    assert fallen == [] if hands_over else ["why"]
    assert made.closure() == "loss"  # it falls back once


@pytest.mark.parametrize(
    ("racer", "steps_left", "length", "of_others", "is_tried"),
    [
        (1, 3, 4, 0, True),
        (0, 3, 4, 0, False),
        (1, 2, 4, 0, False),
        (1, 2, 5, 0, True),
        (1, 2, 4, 1, True),
        (0, 2, 5, 1, False),
    ],
)
def test_first_steps_of_other_plans_and_their_longer_batches_are_tried(racer, steps_left, length, of_others, is_tried):
    race = racing_with(SimpleNamespace(largest=lambda values: [max(*values, of_others)]))
    race._has_begun, race._steps_left = True, steps_left
    race._run = race._run.after((("torch.float32", (2, 4)),))
    if racer:
        race._race = race._race.after([1.0] * 3)
    assert (race._fall_back(None, torch.ones(2, length)) is not None) == is_tried
    race.is_over = True
    assert race._fall_back(None, torch.ones(2, length)) is None


def racing_with(sharded):
    racers = [Racer(name=name, plan=bare_plan(step_time_s=1.0)) for name in ("the plan", "other")]
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), global_step=0)
    return Racing(trainer, SimpleNamespace(model=SimpleNamespace(sharded=sharded, lasting=racers[0].plan)), racers)


def test_a_plan_that_cannot_change_back_ends_training():
    race = racing_with(Sharded())
    with pytest.raises(OSDPError) as raised:
        race._leave_out(SimpleNamespace(callbacks=[]), 1, WHY)
    assert str(raised.value) == (
        "Rank 0 ran out of memory in forward of 'body' in the turn of 'other' in a race of plans, and the plan cannot"
        " change back: it holds gradients. race=False trains without one."
    )
