"""Fits that have no race, and why; what is said of one."""

import logging
import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from lightning_osdp.planner.scheduler import Racer
from lightning_osdp.planner.scheduler.replanning import pace
from lightning_osdp.strategy import racing
from lightning_osdp.strategy.racing import Racing
from tests.strategy.quiet import quiet_trainer
from tests.support.plans import bare_plan


class Net(L.LightningModule):
    def __init__(self, *, automatic=True):
        super().__init__()
        self.automatic_optimization = automatic
        self.body = nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        loss = self.body(batch).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, *, race=True, automatic=True, plan=None, **options):
    trainer = quiet_trainer(
        OSDPStrategy(race=race, plan=plan),
        max_steps=3,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(Net(automatic=automatic), DataLoader(torch.ones(12, 6), batch_size=4))
    return trainer.strategy.plan


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "no other plan that the module could change to is predicted to fit and to be nearly as fast"),
        ({"race": "auto"}, None),
        ({"automatic": False}, "in manual optimization training_step says what an optimizer step is"),
        ({"deterministic": True}, "deterministic training repeats what was trained before: plan= takes osdp_plan.json"),
        ({"fast_dev_run": True}, "fast_dev_run has too few steps"),
        ({"race": False}, None),
    ],
)
def test_it_is_said_why_a_fit_has_no_race(tmp_path, caplog, options, reason):
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with caplog.at_level("INFO"):
            fit(tmp_path, **options)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    told = [text for text in map(logging.LogRecord.getMessage, caplog.records) if "race of plans" in text]
    assert len(told) == (reason is not None)
    assert all(text.startswith(f"OSDP: no race of plans, for {reason}") for text in told)


@pytest.mark.parametrize(("race", "has_reason"), [("auto", True), (True, False)])
def test_compiled_modules_race_only_where_that_is_asked_for(race, has_reason):
    module = Net()
    trainer = SimpleNamespace(lightning_module=module, fast_dev_run=False)
    choice = SimpleNamespace(profile=object(), cluster=object())
    units = SimpleNamespace(
        sharded=SimpleNamespace(plan=bare_plan(step_time_s=1.0)), choice=choice, options=SimpleNamespace(race=race)
    )
    assert racing._reason_against(trainer, units) == ""
    module.body.compile(backend="eager")
    assert bool(racing._reason_against(trainer, units)) == has_reason


def test_a_race_is_open_by_default():
    assert OSDPStrategy()._units.options.race == "auto"


@pytest.mark.usefixtures("one_rank")
def test_a_given_plan_has_no_race(tmp_path, caplog):
    plan = fit(tmp_path, race=False)
    with caplog.at_level("INFO"):
        assert fit(tmp_path, plan=plan) == plan
    assert "OSDP: no race of plans, for the plan was given and nothing profiled." in caplog.text


class Model:
    """A model that notes the plans that it is to use; as a sharded model has, so many bytes are free."""

    def __init__(self, free_bytes=2**30):
        self.used, self.free_bytes = [], free_bytes
        self.sharded = self

    @property
    def plan(self):
        return self.used[-1]

    def use(self, plan, **_):
        self.used.append(plan)


def racer(name, step_time_s, *, peak_bytes=0, is_plain=False):
    return Racer(name=name, plan=bare_plan(step_time_s=step_time_s, peak_bytes=peak_bytes), is_plain=is_plain)


def test_plans_whose_dry_run_does_not_fit_are_left_out(monkeypatch, caplog):
    def run_dry(_, sharded):
        return SimpleNamespace(place="backward" if sharded.plan.peak_bytes > sharded.free_bytes else "")

    monkeypatch.setattr(racing, "run_dry", run_dry)
    racers = [racer("a", 1.0, peak_bytes=5), racer("b", 1.0, peak_bytes=9), racer("c", 1.0, peak_bytes=6)]
    model = Model(free_bytes=7)
    with caplog.at_level("INFO"):
        assert [each.name for each in racing._fitting(None, model, racers)] == ["a", "c"]
    assert model.plan is racers[0].plan
    assert "OSDP: b is left out of the race, for its dry run ran out of memory." in caplog.text


TOO_SHORT = {
    "auto": "up to 8 optimizer steps are more than 10% of the 79 of this fit",
    True: "it may last 8 optimizer steps, and this fit has 7",
}


@pytest.mark.parametrize(
    ("race", "num_steps", "has_one"), [("auto", 80, True), ("auto", 79, False), (True, 8, True), (True, 7, False)]
)
def test_a_race_lasts_as_long_as_its_fit_at_most_and_a_tenth_of_it_unless_asked_for(
    monkeypatch, race, num_steps, has_one
):
    racers = (racer("the plan", 1.0), racer("other", 1.0))
    monkeypatch.setattr(racing, "candidates", lambda *_, **__: racers)
    monkeypatch.setattr(racing, "are_close", lambda *_: True)
    units = SimpleNamespace(
        sharded=SimpleNamespace(plan=racers[0].plan),
        choice=SimpleNamespace(corrected=lambda: (SimpleNamespace(blocks=()), object())),
        options=SimpleNamespace(race=race, engine=None),
    )
    assert racing._racers(units, num_steps) == ([*racers] if has_one else TOO_SHORT[race])
    assert racing._racers(units, math.inf) == [*racers]
    monkeypatch.setattr(racing, "are_close", lambda *_: race is True)
    told_apart = "predictions tell the plans apart"
    assert racing._racers(units, math.inf) == ([*racers] if race is True else told_apart)
    assert racing._racers(units, math.inf, is_again=True) == [*racers]


def test_steps_that_are_left_are_those_of_the_shortest_loader_of_all_ranks(monkeypatch):
    trainer = SimpleNamespace(estimated_stepping_batches=80, global_step=7)
    assert racing._steps_left(trainer) == 73
    monkeypatch.setattr(racing, "all_gather_values", lambda value: [value, 40])
    assert racing._steps_left(trainer) == 40
    trainer.estimated_stepping_batches = -1  # nobody knows on this rank
    assert racing._steps_left(trainer) == 40


class Timer:
    """A timer by which each step takes a second."""

    def __init__(self, _):
        self.ended, self.elements = [], 0

    def start(self):
        pass

    def stop(self, *, num_samples):
        self.elements += num_samples

    def end_step(self):
        self.ended.append((1.0, self.elements))
        self.elements = 0

    def finished(self, *, wait):
        ended, self.ended = self.ended, []
        return iter(ended)


def racing_with(racers, race="auto"):
    """Races of a model that is under the first of these plans, and a function that takes steps of so many elements."""
    model = Model()
    model.use(racers[0].plan)
    model.lasting, model.is_raced = racers[0].plan if len(racers) > 1 else None, False
    model.begin_race = lambda: setattr(model, "lasting", model.plan)
    units = SimpleNamespace(model=model, options=SimpleNamespace(race=race))
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        global_step=0,
        callbacks=[],
        estimated_stepping_batches=-1,
    )
    races = Racing(trainer, units, racers)

    def take(*sizes):
        for size in sizes:
            races.on_train_batch_start(trainer, None, None, 0)
            trainer.global_step += 1
            races.on_train_batch_end(trainer, None, None, torch.ones(size), 0)

    return races, take


@pytest.mark.parametrize("race", ["auto", True])
def test_batches_of_other_lengths_end_a_race_that_nobody_asked_for(race, caplog):
    racers = [racer("the plan", 1.0), racer("other", 1.0, peak_bytes=5)]
    races, take = racing_with(racers, race)
    with caplog.at_level("INFO"):
        take(10, 10, *[10, 10, 5] * 3)  # the turn is taken twice again
        assert races.turn == "the plan"
        take(10)
    assert (races.is_over, races.turn) == ((True, "") if race == "auto" else (False, "other"))
    text = "OSDP: the race of plans was not over when steps turned out to have batches of other lengths than before, so"
    assert (text in caplog.text) == (race == "auto")


def test_plans_with_less_memory_race_once_where_hardly_any_is_left(monkeypatch, caplog):
    planned, less, more = (
        racer(name, 1.0, peak_bytes=size) for name, size in (("the plan", 5), ("less", 4), ("more", 6))
    )
    monkeypatch.setattr(racing, "StepTimer", Timer)
    races, take = racing_with([planned])
    monkeypatch.setattr(racing, "WATCHED_STEPS", 2)
    monkeypatch.setattr(pace, "STEPS_APART", 4)
    monkeypatch.setattr(racing, "_racers", lambda *_, **__: [planned, less, more])
    monitor = SimpleNamespace(is_near_limit=False)
    monkeypatch.setattr(racing, "callbacks_of", lambda *_: [monitor])
    races._steps_left = 2
    take(*[10] * 8)
    assert races.is_over
    monitor.is_near_limit = True
    with caplog.at_level("INFO"):
        take(10)
    assert [each.name for each in races._racers] == ["the plan", "less"]
    assert "OSDP: hardly any memory is left: 2 plans take turns" in caplog.text
    races._set([planned])
    races._model.lasting = None
    take(*[10] * 20)
    assert races.is_over


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ([0.212, 0.3, 0.231], "the plan won the race of 3 plans: 212 ms a step against 231 ms of all ZDP; 200 ms"),
        ([0.212, 0.1, 0.231], "other won the race of 3 plans: 100 ms a step against 231 ms of all ZDP; 200 ms"),
        ([0.212, 0.3, 0.1], "all ZDP won the race of 3 plans: 100 ms a step against 212 ms of the plan; 200 ms"),
    ],
)
def test_one_sentence_says_who_won(seconds, text):
    names = ["the plan", "other", "all ZDP"]
    racers = [racer(name, 0.2, is_plain=name == "all ZDP") for name in names]
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), global_step=0)
    race = Racing(trainer, SimpleNamespace(model=Model()), racers)
    while (turn := race._race.turn) is not None:
        race._race = race._race.after([seconds[turn.racer]] * turn.num_steps)
    won_s = min(seconds)
    assert race._result() == f"{text} was predicted, {abs(0.2 / won_s - 1):.0%} off"


def test_the_sentence_says_that_a_faster_one_was_not_clearly_so():
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), global_step=0)
    race = Racing(trainer, SimpleNamespace(model=Model()), [racer("the plan", 0.2), racer("other", 0.2)])
    race._race = race._race.after([1.0, 0.2, 0.22]).after([1.0, 0.19, 0.22])
    assert race._result() == (
        "the plan won the race of 2 plans: 210 ms a step against 205 ms of other, which is not clearly faster;"
        " 200 ms was predicted, 5% off"
    )
