"""Races of plans: in the first optimizer steps of a fit, and again when its steps have become slower."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_osdp.callbacks.peak import WARM_UP_STEPS, all_callbacks, callbacks_of, elements_in
from lightning_osdp.callbacks.plan_monitor import PlanMonitor, StepTimer
from lightning_osdp.core.correction import Correction
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.errors import ConfigurationError, OSDPError
from lightning_osdp.operations.splitting import compiled
from lightning_osdp.planner.scheduler import (
    ALIKE,
    STEPS_APART,
    WATCHED_STEPS,
    Pace,
    Race,
    Racer,
    RunBatches,
    are_close,
    candidates,
    correction_of,
)
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.report.sentences import tell_correction
from lightning_osdp.strategy.batching.first_batch import shapes_of
from lightning_osdp.strategy.dry_run import run_dry
from lightning_osdp.strategy.planning.publish import write_plan
from lightning_osdp.strategy.runtime.all_ranks import all_gather_values, in_step, on_all_ranks, on_rank_zero
from lightning_osdp.strategy.runtime.error_texts import last_checkpoint
from lightning_osdp.strategy.second_try import SecondTries
from lightning_osdp.strategy.sharding.units import ReusableModel, Units

MOST_AGAIN = 2
"""Times that a turn is taken again in which a step is not `ALIKE` the largest, as an epoch's last one: where all
batches differ, nothing would be compared else."""

MOST_SHARE = 0.1
"""Part of a fit's steps that a race may last where the user leaves open whether there is one.

Turns that are taken again come on top of it.
"""


class Racing(pl.Callback):
    """Callback that changes the plan between optimizer steps as a race says, and has others when steps become slower.

    It stands before all others: a plan changes before anything of a batch has begun, and nothing that other callbacks
    do after a batch counts. Every step is one of training. Its seconds are those of the slowest rank, which ranks tell
    each other at the end of each turn, or of `WATCHED_STEPS` after a race, so that no step waits for them.

    Where memory runs out on a rank in the first step of a turn, or in one with longer batches than those before it, all
    go back to the plan that lasts and take the step again, and the plan of the turn leaves the race. Other steps of the
    turn take as much memory; ranks do not meet in them, for that would be part of their seconds.

    Args:
        trainer: whose fit begins.
        units: that it trains.
        racers: the first one is the plan in use; alone, it has no race for now.
        runs_dry: has later races without plans of more memory than the one in use, which need a dry run.
    """

    def __init__(self, trainer: pl.Trainer, units: Units, racers: Sequence[Racer], *, runs_dry: bool = False) -> None:
        self._units, self._runs_dry, self._tries = units, runs_dry, SecondTries(units)
        self._timer, self._pace = StepTimer(trainer.strategy.root_device), Pace()
        self._global_step = trainer.global_step
        self._watched: Plan | None = None  # plan that the pace is of
        self._has_told_why_not = False  # why nothing is learned of a race
        self._short_bytes = math.inf  # least predicted peak of plans that ran out of memory
        self._near_bytes = 0  # predicted peak of the plan that others have raced for its memory with
        self._set(racers)

    def _set(self, racers: Sequence[Racer]) -> None:
        """Sets who is to race next."""
        self._racers, self._race = racers, Race.of([racer.is_plain for racer in racers])
        self._most_elements = self._num_again = self._num_refused = 0
        self._has_begun = False
        self._are_alike = True  # steps that count, by their elements
        self._run = RunBatches()  # of this turn
        self._used: tuple[Plan, ...] = (racers[0].plan,)  # plans that ranks need not compare again
        self._is_decided = False  # no turn is left, and the plan that stays has to come into use
        self.is_over = len(racers) == 1
        # of this turn, or before the first one, or until the pace is looked at
        self._steps_left = WATCHED_STEPS if self.is_over else WARM_UP_STEPS

    @property
    def _model(self) -> ReusableModel:
        assert self._units.model is not None
        return self._units.model

    @property
    def turn(self) -> str:
        """Name of the candidate under whose plan steps are run; empty before the first turn and after the last one."""
        turn = self._race.turn if self._has_begun and not (self._is_decided or self.is_over) else None
        return "" if turn is None else self._racers[turn.racer].name

    @property
    def number(self) -> int | None:
        """Number of the plan in use, from one, in the line that began the latest race; None before one."""
        if len(self._racers) == 1:
            return None
        turn = self._race.turn if self._has_begun else None
        place = self._race.winner if self._is_decided else None if turn is None else turn.racer
        return 1 + (place or 0)  # the first one is in use before the first turn, and where no plan has won

    def begin(self, trainer: pl.Trainer) -> None:
        """Begins, and says so if plans race."""
        all_callbacks(trainer).insert(0, self)
        self._tries.begin(trainer)
        if not self.is_over:
            self._begin_race("")

    def _begin_race(self, why: str) -> None:
        self._model.begin_race()
        names = ", ".join(f"{number}. {racer.name}" for number, racer in enumerate(self._racers, start=1))
        num_steps = WARM_UP_STEPS + self._race.most_steps
        rank_zero_info(
            f"OSDP: {why}{len(self._racers)} plans take turns in about the next {num_steps} optimizer steps, all of"
            f" which train the same, and the fastest goes on: {names}"
        )

    def end(self, trainer: pl.Trainer) -> None:
        """Leaves the Trainer, at the end of a fit or after an error."""
        self.is_over = True
        callbacks = all_callbacks(trainer)
        callbacks[:] = [callback for callback in callbacks if callback is not self]
        self._tries.end(trainer)

    def break_off(self, trainer: pl.Trainer) -> None:
        """Changes to the plan that stays if the race is not over, for the fit is."""
        self.give_up(trainer, "training ended")
        if not self.is_over:
            rank_zero_warn("OSDP: training ended under another plan than the race left; the next fit changes to that.")

    def give_up(self, trainer: pl.Trainer, why: str) -> None:
        """Changes to the plan that stays, if the race is not over when something ends it."""
        if self.is_over:
            return
        if not self._is_decided:
            rank_zero_info(f"OSDP: the race of plans was not over when {why}, so the plan stays as it was.")
        self._settle(trainer)

    @property
    def _is_timed(self) -> bool:
        """True unless steps are those of a plan that does not stay, and has no turn either."""
        return self.is_over or not self._is_decided

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._steps_left == 0:
            if self.is_over:
                self._watch(trainer)
            elif self._is_decided:
                self._settle(trainer)
            else:
                self._next_turn(trainer)
        self._tries.fall_back = self._fall_back(trainer, batch)
        if self._is_timed:
            self._timer.start()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._is_timed:
            self._timer.stop(num_samples=elements_in(batch))
        if trainer.global_step != self._global_step:  # else gradients accumulate, and the optimizer step comes later
            self._global_step = trainer.global_step
            self._steps_left -= 1
            if self._is_timed:
                self._timer.end_step()

    def _fall_back(self, trainer: pl.Trainer, batch: Any) -> Callable[[str], None] | None:
        """Way back from the turn if memory runs out on the batch that comes; None where it is known to suffice.

        It does for batches such as have been run in this turn, and under the plan that lasts.
        """
        turn = self._race.turn if self.turn else None
        if turn is None or not turn.racer:
            return None
        shapes, is_tried = shapes_of(batch), self._steps_left == turn.num_steps
        if not is_tried:
            is_tried = any(self._model.sharded.largest([not self._run.has_room(shapes)]))
        self._run = self._run.after(shapes)
        return partial(self._leave_out, trainer, turn.racer) if is_tried else None

    def _leave_out(self, trainer: pl.Trainer, number: int, why: str) -> None:
        """Changes back to the plan that lasts, and leaves the racer whose turn it is out of this race and later ones.

        Raises:
            OSDPError: the plan in use cannot change in the middle of this step.
        """
        racer, lasting = self._racers[number], self._model.lasting
        assert lasting is not None

        def go_back() -> None:
            try:
                self._model.sharded.use(lasting, in_window=True)
            except ConfigurationError as error:
                raise OSDPError(
                    f"{why[0].upper()}{why[1:]} in the turn of {racer.name!r} in a race of plans, and the plan cannot"
                    f" change back: {error} race=False trains without one.{last_checkpoint(trainer)}"
                ) from error

        on_all_ranks(go_back)
        rank_zero_warn(
            f"OSDP: {why} in the turn of {racer.name!r}. All ranks take the step again under the plan that the race"
            f" began with, and {racer.name!r} has left."
        )
        self._short_bytes = min(self._short_bytes, racer.plan.peak_bytes)
        self._race, self._has_begun, self._steps_left = self._race.without(number), False, 1

    def _taken(self) -> list[tuple[float, int]]:
        """Seconds of each step since the last call, on the slowest rank, and elements of its batches on all ranks."""
        by_step = zip(*all_gather_values([*self._timer.finished(wait=True)]), strict=True)
        return [(max(each_s for each_s, _ in ranks), sum(number for _, number in ranks)) for ranks in by_step]

    def _next_turn(self, trainer: pl.Trainer) -> None:
        """Notes the turn that has ended, if any has begun, and changes to the plan of the next one or of the winner."""
        seconds, elements = zip(*self._taken(), strict=True)
        self._most_elements = max(self._most_elements, *elements)
        turn = self._race.turn if self._has_begun else None
        if turn is not None:
            is_small = min(elements[1:]) < ALIKE * self._most_elements
            if is_small and self._num_again < MOST_AGAIN:
                self._num_again, self._steps_left = self._num_again + 1, turn.num_steps
                return
            if is_small and self._units.options.race == "auto":
                self.give_up(trainer, "steps turned out to have batches of other lengths than before")
                return
            self._are_alike &= not is_small
            self._race = self._race.after(seconds)
        self._has_begun, self._num_again = True, 0
        turn = self._race.turn
        if turn is None:
            self._decide()
            self._settle(trainer)
            return
        self._steps_left, self._run = turn.num_steps, RunBatches()
        if not self._change(self._racers[turn.racer].plan):
            self._settle(trainer)

    def _watch(self, trainer: pl.Trainer) -> None:
        """Looks at pace and memory of the plan in use, and begins another race where they are not as accepted."""
        steps, plan = self._taken(), self._model.sharded.plan
        assert plan is not None
        self._steps_left = WATCHED_STEPS
        if self._model.lasting is not None:
            return  # longer batches train under another plan, and take longer
        if plan is not self._watched:  # `change_plan` was called, or there has been no race
            self._pace, self._watched = Pace(), plan
        pace = self._pace = self._pace.after(steps)
        if not pace.allows_race:
            return
        is_near = any(each.is_near_limit for each in callbacks_of(trainer, PlanMonitor))
        is_near = any(all_gather_values(is_near)) and plan.peak_bytes != self._near_bytes
        if not (pace.is_slower or is_near):
            return
        self._pace = dataclasses.replace(pace, num_steps=0)
        self._near_bytes = plan.peak_bytes if is_near else self._near_bytes
        racers = _racers(self._units, _steps_left(trainer), is_again=True)
        if isinstance(racers, str):
            return
        most_bytes = racers[0].plan.peak_bytes - is_near if self._runs_dry or is_near else math.inf
        fitting = (each for each in racers[1:] if each.plan.peak_bytes <= most_bytes)
        racers = [racers[0], *(each for each in fitting if each.plan.peak_bytes < self._short_bytes)]
        if len(racers) > 1:
            self._set(racers)
            taken, accepted = format_seconds(pace.latest_s), format_seconds(pace.accepted_s)
            slower = f"steps take {taken}, and took {accepted} when the plan was accepted: "
            self._begin_race(slower if pace.is_slower else "hardly any memory is left: ")

    def _decide(self) -> None:
        """Has the winner's plan stay, which checkpoints store from now on."""
        assert self._race.winner is not None
        winner, text = self._racers[self._race.winner].plan, self._result()
        rank_zero_info(f"OSDP: {text}")
        self._model.lasting = self._corrected(dataclasses.replace(winner, notes=(*winner.notes, text)))
        self._model.is_raced = True

    def _corrected(self, winner: Plan) -> Plan:
        """Returns the plan with what the steps of the race tell of profile and cluster, by which later races go."""
        choice = self._units.choice

        def learned() -> tuple[Correction, float] | str:
            profile, cluster = choice.corrected()
            samples = winner.micro_batch_size * winner.num_micro_batches * winner.world_size
            shares = sorted([self._most_elements, samples * choice.sample_elements])
            if not self._are_alike or shares[0] < ALIKE * shares[1]:
                return "batches are not as large as the profiled one"
            timed = [pair for pair in zip(self._racers, self._race.seconds, strict=True) if pair[1]]
            plans = [racer.plan.as_profiled(profile) for racer, _ in timed]
            found = correction_of(plans, [seconds for _, seconds in timed], profile, cluster)
            if isinstance(found, str):
                return found
            estimate = simulate(winner.as_profiled(profile), found.of_profile(profile), found.of_cluster(cluster))
            return found, estimate.time_s

        result = on_rank_zero(learned)
        if isinstance(result, str):
            if not self._has_told_why_not:
                rank_zero_info(f"OSDP: the race corrects no measurement of computing and of links, for {result}.")
            self._has_told_why_not = True
            return winner
        correction, time_s = result
        rank_zero_info(f"OSDP: by the race, {tell_correction(correction)}.")
        self._units.choice = choice._replace(learned=correction.after(choice.learned))
        return dataclasses.replace(winner, correction=correction.after(winner.correction), corrected_step_time_s=time_s)

    def _settle(self, trainer: pl.Trainer) -> None:
        """Changes to the plan that stays; where that is refused, tries again after more and more steps."""
        self._is_decided, staying = True, self._model.lasting
        assert staying is not None
        if not self._change(staying):
            self._steps_left = self._num_refused
            return
        self.is_over, self._model.lasting = True, None
        winner = self._race.winner
        self._pace = Pace() if winner is None else Pace(self._race.median_s(winner), self._most_elements)
        self._steps_left, self._watched = WATCHED_STEPS, self._model.sharded.plan
        if self._model.is_raced:
            assert self._watched is not None
            write_plan(trainer, self._watched)

    def _change(self, plan: Plan) -> bool:
        """Changes the plan; if that is refused, the one in use stays for now on all ranks, which ends the race."""
        if plan == self._model.sharded.plan:
            return True
        try:
            self._model.sharded.use(plan, is_known=plan in self._used)
        except ConfigurationError as error:  # the same on all ranks
            self._num_refused += 1
            if self._num_refused == 1:
                stays = "plan that it began with" if self._race.winner is None else "winner"
                rank_zero_warn(
                    f"OSDP: the race of plans ends, for the plan in use cannot change: {error} Training goes on under"
                    f" the {stays} as soon as it can."
                )
            return False
        self._used = (*self._used, plan)
        return True

    def _result(self) -> str:
        """Sentence of who won, against whom, and how far the prediction was off."""
        race, winner = self._race, self._race.winner
        assert winner is not None
        others = [number for number, seconds in enumerate(race.seconds) if number != winner and seconds]
        other = next((number for number in others if self._racers[number].name == "all ZDP"), next(iter(others), None))
        slower = (
            ", for no other had room"
            if other is None
            else f" against {format_seconds(race.median_s(other))} of {self._racers[other].name}"
        )
        won_s, plan = race.median_s(winner), self._racers[winner].plan
        slower += ", which is not clearly faster" if other is not None and race.median_s(other) < won_s else ""
        predicted_s = plan.corrected_step_time_s or plan.step_time_s
        return (
            f"{self._racers[winner].name} won the race of {len(self._racers)} plans: {format_seconds(won_s)} a step"
            f"{slower}; {format_seconds(predicted_s)} was predicted, {abs(predicted_s / won_s - 1):.0%} off"
        )


def race_of(trainer: pl.Trainer, units: Units, *, runs_dry: bool) -> Racing | None:
    """The races of a fit; None where there can be none. Where none begins now, it is said why if users ask for one.

    Args:
        trainer: whose fit begins.
        units: that it trains, as planned.
        runs_dry: leave out plans with more memory than the first whose step does not fit in a dry run.
    """
    if units.options.race is False:
        return None
    plan, model, why_never = units.sharded.plan, units.model, _reason_against(trainer, units)
    assert model is not None
    left = 0 if why_never else _steps_left(trainer)
    won = "training goes on under the winner of an earlier one" if model.is_raced else ""
    found = why_never or won or _racers(units, left)
    if isinstance(found, str):
        if units.options.race is True:
            rank_zero_info(f"OSDP: no race of plans, for {found}.")
        found = []
    elif runs_dry:
        found = _fitting(trainer, model, found)
    if plan is None or why_never or (not found and left < STEPS_APART):
        return None
    return Racing(trainer, units, found or [Racer(name="the plan", plan=plan)], runs_dry=runs_dry)


def _reason_against(trainer: pl.Trainer, units: Units) -> str:
    """Reason why this fit can have no race, whatever its plans are; empty for none."""
    plan, choice = units.sharded.plan, units.choice
    if torch.are_deterministic_algorithms_enabled():
        return (
            "deterministic training repeats what was trained before: plan= takes osdp_plan.json or a checkpoint of a"
            " fit that had one"
        )
    if not trainer.lightning_module.automatic_optimization:
        return "in manual optimization training_step says what an optimizer step is"
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
        return "fast_dev_run has too few steps"
    if units.options.race == "auto" and compiled(trainer.lightning_module):
        return "modules that are compiled may be compiled anew in each turn"
    if plan is None or choice.profile is None or choice.cluster is None:
        return "the plan was given and nothing profiled"
    return "" if plan.step_time_s > 0 else "nothing is predicted of the micro-batches that training goes on in"


def _racers(units: Units, left: float, *, is_again: bool = False) -> Sequence[Racer] | str:
    """Finds the same candidates on all ranks, the plan in use first; or says why they need no race.

    Predictions do not tell whether they need one that ``is_again``, for steps no longer take what they took. The fit
    has ``left`` optimizer steps.
    """
    plan, choice, race = units.sharded.plan, units.choice, units.options.race
    assert plan is not None

    def why_too_long(num_racers: int, num_plain: int = 0) -> str:
        num_steps = WARM_UP_STEPS + Race.of([False] * num_racers + [True] * num_plain).most_steps
        if race == "auto" and left < num_steps / MOST_SHARE:
            return f"up to {num_steps} optimizer steps are more than {MOST_SHARE:.0%} of the {left} of this fit"
        return f"it may last {num_steps} optimizer steps, and this fit has {left}" if left < num_steps else ""

    if race == "auto" and (why := why_too_long(2)):
        return why  # most fits of a few steps need no candidates for it

    def found() -> Sequence[Racer] | str:
        profile, cluster = choice.corrected()
        predicted, engine = plan.as_profiled(profile), units.options.engine
        first, *others = candidates(predicted, profile, cluster, engine=engine, may_round=race is True)
        if not others:
            return "no other plan that the module could change to is predicted to fit and to be nearly as fast"
        if race == "auto" and not is_again and not are_close([first, *others], cluster):
            return "predictions tell the plans apart"
        return [first, *others]

    racers = on_rank_zero(found)
    if isinstance(racers, str):
        return racers
    num_plain = sum(racer.is_plain for racer in racers)
    return why_too_long(len(racers) - num_plain, num_plain) or [dataclasses.replace(racers[0], plan=plan), *racers[1:]]


def _steps_left(trainer: pl.Trainer) -> float:
    """Optimizer steps that loaders of all ranks and the Trainer's limits leave; infinite where nobody knows."""
    number = trainer.estimated_stepping_batches
    return min(all_gather_values(math.inf if number < 0 else number - trainer.global_step))


def _fitting(trainer: pl.Trainer, model: ReusableModel, racers: Sequence[Racer]) -> Sequence[Racer]:
    """Racers whose steps fit in a dry run on all ranks; the first one has been run dry."""
    kept = [racers[0]]
    for racer in racers[1:]:
        if racer.plan.peak_bytes > racers[0].plan.peak_bytes:
            model.sharded.use(racer.plan)
            dry_runs = in_step(partial(run_dry, trainer, model.sharded), stage="dry run")
            if any(dry_run.place for dry_run in dry_runs):
                rank_zero_info(f"OSDP: {racer.name} is left out of the race, for its dry run ran out of memory.")
                continue
        kept.append(racer)
    model.sharded.use(racers[0].plan)
    return kept
