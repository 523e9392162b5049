"""Race of plans in the first optimizer steps of a fit, after which training goes on under the fastest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_osdp.callbacks.peak import WARM_UP_STEPS, all_callbacks, elements_in
from lightning_osdp.callbacks.plan_monitor import StepClock
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.scheduler import Race, Racer, are_close, candidates
from lightning_osdp.strategy.dry_run import run_dry
from lightning_osdp.strategy.planning.publish import write_plan
from lightning_osdp.strategy.runtime.all_ranks import all_gather_values, in_step, on_rank_zero
from lightning_osdp.strategy.sharding.units import ReusableModel, Units

COMPARABLE = 0.9
"""Part of the largest step's elements from which on a step can be compared; an epoch's last one may be smaller."""
MOST_AGAIN = 2
"""Times that a turn with such a step is taken again; where all batches differ, nothing would be compared else."""

MOST_SHARE = 0.1
"""Part of a fit's steps that a race may last where the user leaves open whether there is one.

Turns that are taken again come on top of it.
"""


class Racing(pl.Callback):
    """Callback that changes the plan between optimizer steps as a race says.

    It stands before all others: a plan changes before anything of a batch has begun, and nothing that other callbacks
    do after a batch counts. Every step is one of training. Its seconds are those of the slowest rank, which ranks tell
    each other at the end of each turn, so that no step waits for them.

    Args:
        trainer: whose fit begins.
        units: that it trains.
        racers: the first one is the plan in use.
    """

    def __init__(self, trainer: pl.Trainer, units: Units, racers: Sequence[Racer]) -> None:
        self._units, self._racers = units, racers
        self._race = Race.of([racer.is_plain for racer in racers])
        self._clock = StepClock(trainer.strategy.root_device)
        self._global_step, self._has_begun = trainer.global_step, False
        self._steps_left = WARM_UP_STEPS  # of this turn, or before the first one
        self._most_elements = self._num_again = self._num_refused = 0
        self._is_decided = False  # no turn is left, and the plan that stays has to come into use
        self.is_over = False

    @property
    def _model(self) -> ReusableModel:
        assert self._units.model is not None
        return self._units.model

    @property
    def turn(self) -> str:
        """Name of the candidate under whose plan steps are run; empty before the first turn and after the last one."""
        turn = self._race.turn if self._has_begun and not (self._is_decided or self.is_over) else None
        return "" if turn is None else self._racers[turn.racer].name

    def begin(self, trainer: pl.Trainer) -> None:
        """Begins, and says so."""
        all_callbacks(trainer).insert(0, self)
        self._model.begin_race()
        names, num_steps = ", ".join(racer.name for racer in self._racers), WARM_UP_STEPS + self._race.most_steps
        rank_zero_info(
            f"OSDP: {len(self._racers)} plans take turns in about the next {num_steps} optimizer steps, all of which"
            f" train the same, and the fastest goes on: {names}"
        )

    def end(self, trainer: pl.Trainer) -> None:
        """Leaves the Trainer, at the end of a fit or after an error."""
        self.is_over = True
        callbacks = all_callbacks(trainer)
        callbacks[:] = [callback for callback in callbacks if callback is not self]

    def break_off(self, trainer: pl.Trainer) -> None:
        """Changes to the plan that stays if the race is not over, for the fit is."""
        if self.is_over:
            return
        if not self._is_decided:
            rank_zero_info("OSDP: the race of plans was not over when training ended, so the plan stays as it was.")
        self._settle(trainer)
        if not self.is_over:
            rank_zero_warn("OSDP: training ended under another plan than the race left; the next fit changes to that.")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.is_over and self._steps_left == 0:
            self._settle(trainer) if self._is_decided else self._next_turn(trainer)
        if not (self.is_over or self._is_decided):
            self._clock.start()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.is_over:
            return
        if not self._is_decided:
            self._clock.stop(num_samples=elements_in(batch))
        if trainer.global_step != self._global_step:  # else gradients accumulate, and the optimizer step comes later
            self._global_step = trainer.global_step
            self._steps_left -= 1
            if not self._is_decided:
                self._clock.end_step()

    def _next_turn(self, trainer: pl.Trainer) -> None:
        """Notes the turn that has ended, if any has begun, and changes to the plan of the next one or of the winner."""
        by_step = [*zip(*all_gather_values([*self._clock.finished(wait=True)]), strict=True)]
        seconds = [max(each_s for each_s, _ in ranks) for ranks in by_step]
        elements = [sum(number for _, number in ranks) for ranks in by_step]
        self._most_elements = max(self._most_elements, *elements)
        turn = self._race.turn if self._has_begun else None
        if turn is not None:
            is_small = min(elements[1:]) < COMPARABLE * self._most_elements
            if is_small and self._num_again < MOST_AGAIN:
                self._num_again, self._steps_left = self._num_again + 1, turn.num_steps
                return
            self._race = self._race.after(seconds)
        self._has_begun, self._num_again = True, 0
        turn = self._race.turn
        if turn is None:
            self._decide()
            self._settle(trainer)
            return
        self._steps_left = turn.num_steps
        if not self._change(self._racers[turn.racer].plan):
            self._settle(trainer)

    def _decide(self) -> None:
        """Has the winner's plan stay, which checkpoints store from now on."""
        assert self._race.winner is not None
        winner, text = self._racers[self._race.winner].plan, self._result()
        self._model.after_race = dataclasses.replace(winner, notes=(*winner.notes, text))
        self._model.is_raced = True
        rank_zero_info(f"OSDP: {text}")

    def _settle(self, trainer: pl.Trainer) -> None:
        """Changes to the plan that stays; where that is refused, tries again after more and more steps."""
        self._is_decided, staying = True, self._model.after_race
        assert staying is not None
        if not self._change(staying):
            self._steps_left = self._num_refused
            return
        self.is_over, self._model.after_race = True, None
        if self._model.is_raced:
            assert self._model.sharded.plan is not None
            write_plan(trainer, self._model.sharded.plan)

    def _change(self, plan: Plan) -> bool:
        """Changes the plan; if that is refused, the one in use stays for now on all ranks, which ends the race."""
        if plan == self._model.sharded.plan:
            return True
        try:
            self._model.sharded.use(plan)
        except ConfigurationError as error:  # the same on all ranks
            self._num_refused += 1
            if self._num_refused == 1:
                stays = "winner" if self._model.is_raced else "plan that it began with"
                rank_zero_warn(
                    f"OSDP: the race of plans ends, for the plan in use cannot change: {error} Training goes on under"
                    f" the {stays} as soon as it can."
                )
            return False
        return True

    def _result(self) -> str:
        """Sentence of who won, against whom, and how far the prediction was off."""
        race, winner = self._race, self._race.winner
        assert winner is not None
        others = [number for number in range(len(self._racers)) if number != winner]
        other = next((number for number in others if self._racers[number].name == "all ZDP"), others[0])
        won_s, predicted_s = race.median_s(winner), self._racers[winner].plan.step_time_s
        return (
            f"{self._racers[winner].name} won the race of {len(self._racers)} plans: {format_seconds(won_s)} a step"
            f" against {format_seconds(race.median_s(other))} of {self._racers[other].name};"
            f" {format_seconds(predicted_s)} was predicted, {abs(predicted_s / won_s - 1):.0%} off"
        )


def race_of(trainer: pl.Trainer, units: Units, *, runs_dry: bool) -> Racing | None:
    """The race that a fit begins with; None where there is none, which is said unless the user wants none.

    Args:
        trainer: whose fit begins.
        units: that it trains, as planned.
        runs_dry: leave out plans with more memory than the first whose step does not fit in a dry run.
    """
    if units.options.race is False:
        return None
    found = _reason_against(trainer, units) or _racers(trainer, units)
    if isinstance(found, str):
        rank_zero_info(f"OSDP: no race of plans, for {found}.")
        return None
    assert units.model is not None
    if runs_dry:
        found = _fitting(trainer, units.model, found)
    return Racing(trainer, units, found) if len(found) > 1 else None


def _reason_against(trainer: pl.Trainer, units: Units) -> str:
    """Reason why this fit has no race, whatever its plans are; empty for none."""
    plan, choice = units.sharded.plan, units.choice
    if torch.are_deterministic_algorithms_enabled():
        return (
            "deterministic training repeats what was trained before: plan= takes osdp_plan.json or a checkpoint of a"
            " fit that had one"
        )
    if not trainer.lightning_module.automatic_optimization:
        return "in manual optimization training_step says what an optimizer step is"
    assert units.model is not None
    if units.model.is_raced:
        return "training goes on under the winner of an earlier one"
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
        return "fast_dev_run has too few steps"
    if plan is None or choice.profile is None or choice.cluster is None:
        return "the plan was given and nothing profiled"
    return "" if plan.step_time_s > 0 else "nothing is predicted of the micro-batches that training goes on in"


def _racers(trainer: pl.Trainer, units: Units) -> Sequence[Racer] | str:
    """Finds the same candidates on all ranks, the plan in use first; or says why they need no race."""
    plan, choice, race = units.sharded.plan, units.choice, units.options.race
    assert plan is not None

    def found() -> Sequence[Racer] | str:
        assert choice.profile is not None
        assert choice.cluster is not None
        predicted, engine = plan.as_profiled(choice.profile), units.options.engine
        first, *others = candidates(predicted, choice.profile, choice.cluster, engine=engine, may_round=race is True)
        if not others:
            return "no other plan that the module could change to is predicted to fit and to be nearly as fast"
        if race == "auto" and not are_close([first, *others], choice.cluster):
            return "predictions tell the plans apart"
        return [first, *others]

    racers = on_rank_zero(found)
    if isinstance(racers, str):
        return racers
    num_steps = WARM_UP_STEPS + Race.of([racer.is_plain for racer in racers]).most_steps
    left = min(all_gather_values(_steps_left(trainer)))  # loaders may have other lengths on other ranks
    if race == "auto" and left < num_steps / MOST_SHARE:
        return f"up to {num_steps} optimizer steps are more than {MOST_SHARE:.0%} of the {left} of this fit"
    if left < num_steps:
        return f"it may last {num_steps} optimizer steps, and this fit has {left}"
    return [dataclasses.replace(racers[0], plan=plan), *racers[1:]]


def _steps_left(trainer: pl.Trainer) -> float:
    """Optimizer steps that this rank's loaders and the Trainer's limits leave; infinite where nobody knows."""
    number = trainer.estimated_stepping_batches
    return math.inf if number < 0 else number - trainer.global_step


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
