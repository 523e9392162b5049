"""Plans that take turns in the first steps of a fit: all steps train the same, and the fastest plan goes on."""

import dataclasses
import itertools
import warnings
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPPrecision, OSDPStrategy, Plan, PlanMonitor, SearchSpace
from lightning_osdp.apply.ranks import agreement
from lightning_osdp.callbacks import plan_monitor
from lightning_osdp.callbacks.peak import WARM_UP_STEPS
from lightning_osdp.core.correction import Correction
from lightning_osdp.errors import CalledOffError, ConfigurationError
from lightning_osdp.planner.engine import engine_of
from lightning_osdp.planner.scheduler import Race, candidates
from lightning_osdp.planner.scheduler.replanning import correcting, pace
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.report.tables import render
from lightning_osdp.strategy import racing
from tests.distributed.support.fits import shared_folder, stated_cluster, trainer, without_measuring
from tests.distributed.support.parts import BLOCKS, MICRO_BATCHES, Net, apart
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


def steps_of(are_plain):
    """Steps of a fit with a race of so many plans, and of a few after it."""
    return WARM_UP_STEPS + Race.of(are_plain).most_steps + 4


STEPS = steps_of([False] * 5 + [True] * 2)
THREE = {"num_racers": 3, "steps": steps_of([False] * 3)}
"""Options of a fit in which three plans race."""
EVERY = SearchSpace(min_unit_bytes=0, sync=("every",), activations=("keep", "recompute"), slices=(1,))
"""Plans that add gradients up in one order; levels and slices, which are in none, are not searched for."""


class Validated(Net):
    """Draws random numbers where it is validated, too; its learning rate changes."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def val_dataloader(self):
        return self.loader(dist.get_rank(), dist.get_world_size())


class Recorder(L.Callback):
    """Record of the turns that optimizer steps were in, and of what was used in them."""

    def __init__(self, stops_at, *, balances):
        self.turns, self.used, self.stops_at, self.balances = [], {}, stops_at, balances

    def on_train_start(self, trainer, pl_module):
        if self.balances:
            balanced(trainer.strategy)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (batch_idx + 1) % MICRO_BATCHES == 0:
            race = trainer.strategy._racing
            self.turns.append("" if race is None else race.turn)
            self.used[self.turns[-1]] = trainer.strategy.plan
        if trainer.global_step == self.stops_at:
            trainer.should_stop = True


WRONG = Correction(computing=1.5, links={"all": 0.5})
"""Factors that computing and links take in a race, of what was measured."""


def balanced(strategy):
    """Has computing take a third of what links take, so that with `WRONG` they take equally long in a step."""
    units, plan = strategy._units, strategy.plan
    profile = units.choice.profile
    step = simulate(plan.as_profiled(profile), profile, units.choice.cluster)
    profile = Correction(computing=step.communication_s / 3 / step.compute_s).of_profile(profile)
    units.choice = units.choice._replace(profile=profile)


def wrongly_measured_s(plan, choice):
    """Seconds of a step with `WRONG`, by rank 0's numbers: it is the slowest one."""
    if dist.get_rank():
        return 0.0
    profile = WRONG.of_profile(choice.profile)
    return simulate(plan.as_profiled(profile), profile, WRONG.of_cluster(choice.cluster)).time_s


def stated(strategy, fastest, untried_s, *, is_wrong):
    """A timer by which steps take 2 s under the plan of this place in the race, and 3 s on one of the ranks else.

    Steps that are in no turn take ``untried_s``. If measuring ``is_wrong``, those in a turn take `wrongly_measured_s`,
    and a little less under the plan of this place.
    """

    class Timer:
        def __init__(self, device):
            self.ended, self.elements = [], 0

        def start(self):
            self.is_running = True

        def stop(self, *, num_samples):
            assert self.is_running
            self.elements += num_samples

        def end_step(self):
            turn, names = strategy._racing.turn, [racer.name for racer in strategy._racing._racers]
            slow_here = turn != "" and (names.index(turn) + dist.get_rank()) % 2
            seconds = 2.0 if turn == names[fastest] else 3.0 if slow_here else 1.0 if turn else untried_s
            if is_wrong and turn:
                plan = strategy._racing._racers[names.index(turn)].plan
                seconds = wrongly_measured_s(plan, strategy._units.choice) * (0.999 if turn == names[fastest] else 1)
            self.ended.append((seconds, self.elements))
            self.elements = 0

        def finished(self, *, wait):
            ended, self.ended = self.ended, []
            return iter(ended)

    return Timer


def module_for(precision):
    """A model; in low precision batch statistics are a matter of their own."""
    if precision == "64-true":
        return Validated().double()
    module = Validated()
    for name in BLOCKS:
        module.get_submodule(name).norm = nn.LayerNorm(6)
    return module


def fitted(
    race,
    folder,
    *,
    fastest=0,
    untried_s=1.0,
    space=EVERY,
    steps=STEPS,
    epochs=-1,
    num_validated=1,
    module=None,
    precision="64-true",
    stops_at=None,
    accumulates=MICRO_BATCHES,
    num_racers=None,
    is_wrong=False,
    longer_batches=True,
    **options,
):
    """A fit with validation, checkpoints, accumulation and clipping; the Trainer, the module and the record."""
    torch.manual_seed(5)
    module, recorder = module_for(precision) if module is None else module, Recorder(stops_at, balances=is_wrong)
    given = {"search_space": space, "memory_limit": "1GiB", "longer_batches": longer_batches}
    strategy = OSDPStrategy(race=race, batch_size="keep", **given)
    saved = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
    fit = trainer(
        strategy,
        plugins=[OSDPPrecision(precision)],
        callbacks=[recorder, saved],
        enable_checkpointing=True,
        max_steps=steps,
        max_epochs=epochs,
        limit_val_batches=num_validated,
        gradient_clip_val=0.5,
        accumulate_grad_batches=accumulates,
        default_root_dir=folder,
    )

    def found(*args, **given):
        racers = candidates(*args, **given)
        return [*racers[: num_racers - 1], racers[-1]] if is_wrong else racers[:num_racers]  # the last one sends more

    with (
        without_measuring,
        mock.patch.object(racing, "StepTimer", stated(strategy, fastest, untried_s, is_wrong=is_wrong)),
        mock.patch.object(racing, "candidates", found),
    ):
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()), weights_only=False, **options)
    return fit, module, recorder


def weights_of(fit, module):
    """Whole parameters: running statistics are each rank's own, of which a checkpoint has rank 0's."""
    state = fit.strategy.whole_state_dict(on_all_ranks=True)
    buffers = {name for name, _ in module.named_buffers()}
    return {name: value for name, value in state.items() if name not in buffers}


def is_known(fit, plan):
    """True if a later Trainer of the model may be given this plan."""
    units = fit.strategy._units
    try:
        units.model.check_options(dataclasses.replace(units.options, plan=plan))
    except ConfigurationError:
        return False
    return True


def how_it_runs(plan):
    return [unit.treatments for unit in plan.units], [block.treatment for block in plan.blocks], engine_of(plan)


def races(places=(0, 1, -1), **options):
    """Fits in which the plans at these places are the fastest, beside one without a race."""
    expected, module, _ = fitted(False, shared_folder(), **options)
    weights, found = weights_of(expected, module), []
    for place in places:
        folder = shared_folder()
        fit, ours, recorder = fitted(True, folder, fastest=place, **options)
        monitor = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
        plan, name = fit.strategy.plan, fit.strategy._racing._racers[place].name
        found.append(
            {
                "apart": apart(weights_of(fit, ours), weights),
                "losses apart": max(abs(one - other) for one, other in zip(ours.losses, module.losses, strict=True)),
                "is winner": how_it_runs(plan) == how_it_runs(recorder.used[name]),
                "is written": Plan.load(folder / "osdp_plan.json") == plan,
                "is followed": monitor._plan is plan and monitor.measured.peak_bytes is not None,
                "is logged": monitor.latest["osdp/racer"] == 1 + place % len(fit.strategy._racing._racers),
                "has left": not any(isinstance(callback, racing.Racing) for callback in fit.callbacks),
                "note": plan.notes[-1].startswith(f"{name} won the race of ")
                and " 2.00 s a step against 3.00 s of " in plan.notes[-1],
                "known": {each for each, used in recorder.used.items() if each and is_known(fit, used)},
                "turns": recorder.turns,
                "number": len({repr(how_it_runs(each)) for each in recorder.used.values()}),
            }
        )
    return found


def is_stored_as_raced(fit):
    return "osdp_raced" in torch.load(fit.checkpoint_callback.best_model_path, weights_only=False)


def resumes(goes_on):
    """A fit that ends in mid-race and is resumed, beside one without a race; and others after its race, if asked."""
    options, epochs = {"steps": -1, "num_validated": 0, "num_racers": 3}, 4
    expected, module, _ = fitted(False, shared_folder(), epochs=epochs, **options)
    folder, later = shared_folder(), shared_folder()
    with mock.patch.object(plan_monitor, "show") as shown:
        first, _, recorder = fitted(True, folder, epochs=epochs, stops_at=10, **options)
    path = folder / "step=10.ckpt"
    stored = torch.load(path, weights_only=False)["osdp_plan"]
    with mock.patch.object(correcting, "LEAST_ERROR", 1e-3), mock.patch.object(plan_monitor, "show") as compared:
        second, ours, again = fitted(True, later, fastest=1, epochs=epochs, ckpt_path=path, is_wrong=True, **options)
    race, plan = second.strategy._racing._race, second.strategy.plan
    found = {
        "apart": apart(weights_of(second, ours), weights_of(expected, module)),
        "compared": shown.called,
        "is raced": [is_stored_as_raced(each) for each in (first, second)],
        "ended in a turn": recorder.turns[-1] != "",
        "has its plan": how_it_runs(first.strategy.plan) == how_it_runs(Plan.load(folder / "osdp_plan.json")),
        "stored": how_it_runs(Plan.from_json(stored)) == how_it_runs(first.strategy.plan),
        "raced again": len({*again.turns}) > 3 and again.turns[-1] == "",
        "computing": plan.correction.computing,
        "links": plan.correction.links["all"],
        "corrected": plan.corrected_step_time_s / race.median_s(race.winner),
        "is written": Plan.load(later / "osdp_plan.json") == plan,
        "is compared": all("corrected" in render(*each.args) for each in compared.call_args_list),
    }
    if not goes_on:
        return found, {}
    last, epochs = second.checkpoint_callback.best_model_path, epochs + 1
    done, _, none = fitted(True, shared_folder(), epochs=epochs, ckpt_path=last, **options)
    space = SearchSpace(min_unit_bytes=0)
    otherwise, *_ = fitted(True, shared_folder(), epochs=epochs, ckpt_path=last, space=space, **options)
    reused, *_ = fitted(False, shared_folder(), epochs=1, module=ours, **options)
    return found, {
        "is raced": [is_stored_as_raced(each) for each in (done, otherwise, reused)],
        "raced after that": {*none.turns} != {""},
        "kept the winner": how_it_runs(done.strategy.plan) == how_it_runs(plan) != how_it_runs(first.strategy.plan),
        "is learned": [each.strategy.plan.correction == plan.correction for each in (first, done, otherwise)],
        "latency": otherwise.strategy.cluster.all_gather.latency_s / stated_cluster(2).all_gather.latency_s,
    }


def becomes_slower():
    """Turns of a fit whose steps become slower after each race of two plans, and what is left and said of it."""
    expected, module, _ = fitted(False, shared_folder(), steps=34)
    folder = shared_folder()
    with (
        mock.patch.object(racing, "WATCHED_STEPS", 4),
        mock.patch.object(pace, "STEPS_APART", 8),
        mock.patch.object(racing, "rank_zero_info") as told,
    ):
        fit, ours, recorder = fitted(True, folder, fastest=1, untried_s=2.4, steps=34, num_racers=2)
    plan = fit.strategy.plan
    return {
        "apart": apart(weights_of(fit, ours), weights_of(expected, module)),
        "turns": [(name, len([*steps])) for name, steps in itertools.groupby(recorder.turns)],
        "won": sum("won the race of 2 plans" in note for note in plan.notes),
        "is written": Plan.load(folder / "osdp_plan.json") == plan,
        "told": [text for (text,), _ in told.call_args_list if "take turns" in text],
        "why not": [text for (text,), _ in told.call_args_list if "corrects" in text],
    }


class Short(Validated):
    """Has no memory left on some ranks in one micro-batch of a turn: at the begin, in forward or in backward.

    It draws random numbers before, changes its buffers, its batch and what it has logged.

    Args:
        shortages: by the number of a racer, ranks, the micro-batch, counted in its turn, and the place.
        error: class of another error that ranks have there.
    """

    def __init__(self, shortages, error=torch.OutOfMemoryError):
        super().__init__()
        self.shortages, self.place, self.error = shortages, "", error
        self.last.register_forward_pre_hook(lambda *_: self.stop("forward"))
        self.alone.register_forward_hook(lambda module, args, output: self.stop_in_backward(output[0]))

    def training_step(self, batch, batch_idx):
        race = self.trainer.strategy._racing
        turn = race._race.turn if race is not None and race.turn else None
        ranks, micro_batch, place = self.shortages.get(-1 if turn is None else turn.racer, ((), 0, ""))
        number = 0 if turn is None else batch_idx % MICRO_BATCHES + MICRO_BATCHES * (turn.num_steps - race._steps_left)
        is_short = dist.get_rank() in ranks and number == micro_batch
        self.place = place if is_short else ""
        batch[0].mul_(1.5)
        self.log("targets", batch[1].mean(), on_step=False, on_epoch=True)
        self.stop("begin")
        return super().training_step(batch, batch_idx)

    def stop(self, place):
        if self.place == place:
            self.place = ""  # validation has none of it
            raise self.error("nothing is left")

    def stop_in_backward(self, output):
        if output.requires_grad:
            output.register_hook(lambda _: self.stop("backward"))


class Uneven(Short):
    """Has one batch with more samples than others, on the last rank: the second of the second step of a turn."""

    def loader(self, rank, world_size):
        batches = [*super().loader(rank, world_size)]
        number = (WARM_UP_STEPS + 3 + 1) * MICRO_BATCHES + 1
        if rank == world_size - 1:
            batches[number] = [torch.cat([tensor, tensor]) for tensor in batches[number]]
        return DataLoader(batches, batch_size=None)


SHORTAGES = {
    1: ((1,), 0, "forward"),
    2: ((0,), 1, "backward"),
    3: ((0, 1, 2, 3), 0, "backward"),
    4: ((0,), 1, "begin"),
}


def logged_by(fit):
    """Values that the module has logged, each of which is there."""
    return {name: float(fit.callback_metrics[name]) for name in ("train_loss", "targets", "val_loss")}


def falls_back(sync):
    """A fit in whose race plans run out of memory, beside one without a race."""
    space = dataclasses.replace(EVERY, sync=(sync,))
    expected, module, _ = fitted(False, shared_folder(), module=Short({}).double(), space=space)
    folder, ours = shared_folder(), Short(SHORTAGES).double()
    may_race = mock.patch.multiple(racing, MOST_SHARE=1.0, are_close=lambda *_: True)
    with warnings.catch_warnings(record=True) as told, may_race:
        warnings.simplefilter("always")
        fit, _, recorder = fitted("auto", folder, fastest=-1, module=ours, space=space)
    race = fit.strategy._racing
    return {
        "apart": apart(weights_of(fit, ours), weights_of(expected, module)),
        "buffers": apart(dict(ours.named_buffers()), dict(module.named_buffers())),
        "losses": ours.losses == module.losses,
        "logged": logged_by(fit) == logged_by(expected),
        "texts": [text for text in (str(each.message) for each in told) if "ran out of memory" in text],
        "names": [each.name for each in race._racers],
        "turns": [name for name, _ in itertools.groupby(recorder.turns) if name],
        "plan": how_it_runs(fit.strategy.plan) == how_it_runs(race._racers[-1].plan),
        "note": fit.strategy.plan.notes[-1],
        "is own": "_make_closure" not in vars(fit.fit_loop.epoch_loop.automatic_optimization),
    }


def falls_back_later():
    """A race in which a plan runs out of memory on a batch that is longer than those of its turn before it."""
    options = {"space": EVERY, "num_racers": 3, "steps": 24, "longer_batches": False}  # which would end the race
    expected, module, _ = fitted(False, shared_folder(), module=Uneven({}).double(), **options)
    ours = Uneven({1: ((0,), MICRO_BATCHES + 1, "backward")}).double()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit, _, recorder = fitted(True, shared_folder(), module=ours, **options)
    names = [each.name for each in fit.strategy._racing._racers]
    return {
        "apart": apart(weights_of(fit, ours), weights_of(expected, module)),
        "buffers": apart(dict(ours.named_buffers()), dict(module.named_buffers())),
        "losses": ours.losses == module.losses,
        "logged": logged_by(fit) == logged_by(expected),
        "turns": [(name and names.index(name), len([*steps])) for name, steps in itertools.groupby(recorder.turns)],
    }, [text for text in (str(each.message) for each in told) if "ran out of memory" in text]


def ends_in_a_turn(error):
    """Text of the error in a turn, the callbacks that are left, and how a fit without a race goes on after it."""
    module, folder = Short({2: ((0, 1), 2 * MICRO_BATCHES, "forward")}, error).double(), shared_folder()
    with pytest.raises(error) as raised:
        fitted(True, folder, module=module)
    is_racing, later = module.trainer.strategy.is_racing, shared_folder()
    again, _, recorder = fitted(False, later, module=module, steps=3, accumulates=2 * MICRO_BATCHES)
    left = [callback for callback in again.callbacks if isinstance(callback, racing.Racing)]
    plan = again.strategy.plan
    is_back = how_it_runs(plan) == how_it_runs(Plan.load(folder / "osdp_plan.json"))
    is_written = plan == Plan.load(later / "osdp_plan.json") and plan.num_micro_batches == 2 * MICRO_BATCHES
    assert have_met(again.strategy._sharded) == [False, True]
    return str(raised.value), is_racing, left, again.global_step, {*recorder.turns}, is_back, is_written


def have_met(sharded):
    """Answers of two calls by rank 0: others wait elsewhere at the first, and come to the second."""
    with mock.patch.object(agreement, "_CALLING_S", 0.05):
        is_there = sharded.call_off() if dist.get_rank() == 0 else None
    dist.barrier()
    found = [is_there]
    if dist.get_rank():
        with pytest.raises(CalledOffError), sharded.meeting():
            pass
        with pytest.raises(CalledOffError), sharded.meeting():
            sharded.largest([1])
    else:
        found.append(sharded.call_off())
    shared = [found]
    dist.broadcast_object_list(shared)
    return shared[0]


class Holding(Validated):
    """Keeps graphs of forwards that no backward comes to, so that no plan can change, from the end of a turn on."""

    def __init__(self, is_turn, *, num_steps):
        super().__init__()
        self.is_turn, self.num_left, self.has_begun = is_turn, num_steps * MICRO_BATCHES, False

    def training_step(self, batch, batch_idx):
        race, self.held = self.trainer.strategy._racing, None
        is_last_step = race is not None and race.turn != "" and race._steps_left == 1
        self.has_begun |= is_last_step and self.is_turn(race._race)
        if self.has_begun and self.num_left > 0:
            self.num_left -= 1
            self.held = self.loss(batch)
        return super().training_step(batch, batch_idx)


HELD_STEPS = 30
HOLDING = {
    "one step of another turn": (lambda race: race.is_first_round and race.waiting[0] == 1, 1),
    "one step of the last turn": (lambda race: len(race.running) == 2 and len(race.waiting) == 1, 1),
    "another turn": (lambda race: race.is_first_round and race.waiting[0] == 1, HELD_STEPS),
}
"""Turns at whose ends graphs are held, and for how many steps."""


def held():
    """Races in which the plan cannot change, what is left of each, and the plan of a fit after the last one."""
    found = {}
    for name, (is_turn, num_steps) in HOLDING.items():
        folder, module = shared_folder(), Holding(is_turn, num_steps=num_steps).double()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit, _, recorder = fitted(True, folder, module=module, num_racers=3, steps=HELD_STEPS)
        plan, written, race = fit.strategy.plan, Plan.load(folder / "osdp_plan.json"), fit.strategy._racing
        found[name] = {
            "steps": (fit.global_step, fit.strategy.is_racing, recorder.turns[-1]),
            "texts": [text for text in (str(each.message) for each in told) if "race of plans ends" in text],
            "in use": [each.name for each in race._racers if how_it_runs(each.plan) == how_it_runs(plan)],
            "is written": plan == written,
            "is raced": is_stored_as_raced(fit),
        }
    again, *_ = fitted(False, shared_folder(), module=module, steps=3)
    return found, how_it_runs(again.strategy.plan) == how_it_runs(written)


EXPECTED = dict.fromkeys(["is winner", "is written", "is followed", "is logged", "has left", "note"], True)


def check(found, *, most_apart):
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert found["apart"] <= most_apart
    assert found["losses apart"] <= most_apart
    assert found["number"] >= 3
    assert found["known"] == {"the plan"}
    turns = found["turns"]
    assert turns[:WARM_UP_STEPS] == [""] * WARM_UP_STEPS
    assert turns[-1] == ""
    lengths = [len([*steps]) for name, steps in itertools.groupby(turns[WARM_UP_STEPS:]) if name]
    assert {*lengths} <= {2, 3}


@pytest.mark.parametrize(
    ("world_size", "precision", "places", "options"),
    [
        (2, "64-true", [-1], THREE),
        *(slow(*case, [0, 1, -1], {}) for case in itertools.product((2,), ("64-true", "32-true", "bf16-mixed"))),
        slow(4, "64-true", [0, 1, -1], {}),
    ],
)
def test_a_race_trains_as_any_one_plan_does_and_the_fastest_goes_on(ranks, world_size, precision, places, options):
    """All plans have turns, whichever is the fastest."""
    for found in ranks(world_size).run(races, precision=precision, places=places, **options):
        for each in found:
            check(each, most_apart=0.0)


@pytest.mark.slow
def test_where_gradients_are_reduced_at_other_times_training_is_equal_within_rounding(ranks):
    for found in ranks(2).run(races, space=SearchSpace(min_unit_bytes=0)):
        for each in found:
            check(each, most_apart=1e-12)


@pytest.mark.slow  # tests/strategy/test_racing.py says which fits have a race
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_fit_that_ends_in_a_race_is_resumed_and_one_that_has_had_a_race_has_no_other(ranks, goes_on):
    for found, later in ranks(2).run(resumes, goes_on=goes_on):
        assert found == {
            "apart": 0.0,
            "compared": False,
            "is raced": [False, True],
            "ended in a turn": True,
            "has its plan": True,
            "stored": True,
            "raced again": True,
            "computing": pytest.approx(1.5, rel=0.05),
            "links": pytest.approx(0.5, rel=0.05),
            "corrected": pytest.approx(1.0, rel=0.02),
            "is written": True,
            "is compared": True,
        }
        expected = {
            "is raced": [True, False, True],
            "raced after that": False,
            "kept the winner": True,
            "is learned": [False, True, True],
            "latency": pytest.approx(0.5, rel=0.05),
        }
        assert later == (expected if goes_on else {})


@pytest.mark.slow  # tests/planner/scheduler/replanning/test_pace.py says when they do
def test_plans_race_again_when_steps_have_become_slower_but_not_too_often(ranks):
    for found in ranks(2).run(becomes_slower):
        assert (found["apart"], found["won"], found["is written"]) == (0.0, 2, True)
        names, lengths = zip(*found["turns"], strict=True)
        first, second = names[2], names[5]
        assert names == ("", "the plan", first, "", "the plan", second, "")
        assert lengths == (WARM_UP_STEPS, 3, 3, 8 + WARM_UP_STEPS, 3, 3, 10)
        (why_not,) = found["why not"]  # it is said once
        assert why_not.startswith("OSDP: the race corrects no measurement of computing and of links, for ")
        assert why_not.endswith(", for 2 plans are too few to tell 2 factors.")
        again = found["told"][1]
        assert len(found["told"]) == 2
        assert again.startswith(
            "OSDP: steps take 2.40 s, and took 2.00 s when the plan was accepted: 2 plans take turns"
        )
        assert again.endswith(f": 1. the plan, 2. {second}")


@pytest.mark.parametrize(("world_size", "sync"), [(2, "last"), slow(2, "every"), slow(4, "last")])
def test_plans_that_run_out_of_memory_leave_the_race_and_training_is_equal(ranks, world_size, sync):
    """Each of them does so in the first step of its turn, some ranks alone, others having gone further."""
    for rank, found in enumerate(ranks(world_size).run(falls_back, sync=sync)):
        assert {name: found[name] for name in ("apart", "buffers", "losses", "logged", "plan", "is own")} == {
            "apart": 0.0,
            "buffers": 0.0,
            "losses": True,
            "logged": True,
            "plan": True,
            "is own": True,
        }
        names = found["names"]
        assert len(names) > len(SHORTAGES) + 1
        short = {names[number] for number in SHORTAGES}
        assert not short & {*found["turns"]}
        assert {*found["turns"]} == {*names} - short
        assert found["note"].startswith(f"{names[-1]} won the race of ")
        assert len(found["texts"]) == (len(SHORTAGES) if rank == 0 else 0)
        for text, (number, (failed, _, place)) in zip(found["texts"], SHORTAGES.items(), strict=False):
            assert text.startswith(f"OSDP: rank {failed[0]} ran out of memory in ")
            assert place == "begin" or f" {place} of " in text
            assert text.endswith(
                f" in the turn of {names[number]!r}. All ranks take the step again under the plan that the race began"
                f" with, and {names[number]!r} has left."
            )


@pytest.mark.slow
def test_a_plan_that_runs_out_of_memory_on_a_longer_batch_leaves_in_a_later_step_of_its_turn(ranks):
    for rank, (found, told) in enumerate(ranks(2).run(falls_back_later)):
        assert (found["apart"], found["buffers"], found["losses"], found["logged"]) == (0.0, 0.0, True, True)
        lengths = [("", WARM_UP_STEPS), (0, 3), (1, 1), ("", 1)]  # the step that is taken again is in no turn
        assert found["turns"][:4] == lengths
        assert found["turns"][4][0] == 2
        assert len(told) == (rank == 0)
        assert all(text.startswith("OSDP: rank 0 ran out of memory in backward of ") for text in told)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, slow(SIGTERMException), slow(ValueError)])
def test_an_error_in_a_turn_names_the_turn_and_leaves_nothing_of_the_race(ranks, error):
    """Memory runs out in the third step of a turn, on a usual batch, from which training does not go back."""
    for text, is_racing, left, steps, turns, is_back, is_written in ranks(2).run(ends_in_a_turn, error=error):
        if error is torch.OutOfMemoryError:
            assert "nothing is left\nOSDP: rank " in text
            assert " in a race of plans: race=False trains without one. The last checkpoint is " in text
        assert (is_racing, left, steps, turns, is_back, is_written) == (False, [], 3, {""}, True, True)


@pytest.mark.slow
def test_a_race_in_which_the_plan_cannot_change_ends_under_the_one_that_stays_as_soon_as_that_can(ranks):
    for rank, (found, is_back) in enumerate(ranks(2).run(held)):
        for name, each in found.items():
            is_stuck, is_won = name == "another turn", name == "one step of the last turn"
            assert each["steps"] == (HELD_STEPS, False, "")
            assert len(each["texts"]) == (rank == 0)
            stays = "winner" if is_won else "plan that it began with"
            for text in each["texts"]:
                assert "has outputs of a forward that backward has not come to" in text
                assert text.endswith(f"Training goes on under the {stays} as soon as it can.")
            assert (each["in use"] == ["the plan"], each["is written"]) == (not is_stuck, not is_stuck)
            assert each["is raced"] == is_won
        assert is_back
