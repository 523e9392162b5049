"""Longer batches: all ranks change to a plan with less memory before a batch that the one in use has no room for."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_osdp.callbacks.peak import all_callbacks
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.errors import ConfigurationError, InfeasibleError, OSDPError
from lightning_osdp.planner.engine import engine_of
from lightning_osdp.planner.scheduler import (
    KnownBatch,
    KnownBatches,
    Room,
    RunBatches,
    Shapes,
    room_for_longer,
    thriftier,
    thriftiest,
    times_longer,
)
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.profiler import raise_if_fatal, samples_in
from lightning_osdp.strategy.batching.first_batch import shapes_of
from lightning_osdp.strategy.dry_run import keeping_less
from lightning_osdp.strategy.planning.profile_batch import BatchProfiler
from lightning_osdp.strategy.racing import Racing
from lightning_osdp.strategy.runtime.all_ranks import all_gather_values, on_rank_zero
from lightning_osdp.strategy.runtime.error_texts import last_checkpoint
from lightning_osdp.strategy.second_try import SecondTries
from lightning_osdp.strategy.sharding.units import ReusableModel, Units

MOST_PROFILED = 20
"""Batches that are profiled in one fit. Where more are longer than all before in some tensor, as images with ever other
numbers of boxes, training goes on under the plan with least memory that has been needed so far."""
_NUM_CHANGES = 2
"""Changes of the plan that a way back costs: there, and away again when the next long batch comes."""
_MOST_SHOWN = 3
"""Tensors of a batch that a text names."""


class _Profiled(NamedTuple):
    """Batch of a rank that none of the plans is known to have room for."""

    rank: int
    shapes: Shapes
    num_samples: int
    profile: ModelProfile


class _Found(NamedTuple):
    """Plans, the usual one first, what is known of batches under them, and seconds of a usual step under each."""

    plans: tuple[Plan, ...]
    known: KnownBatches
    usual_s: tuple[float, ...]


class LongerBatches(pl.Callback):
    """Callback that changes the plan before a micro-batch for which the one in use has too little memory, and back.

    Before each micro-batch ranks tell each other, by one small all-reduce between hosts, which plan theirs needs: a
    rank that has a usual one could not know otherwise that another rank is about to change. Lightning has one such
    collective before each micro-batch already, for SIGTERM. Whatever else is done is done when a batch is longer than
    all that are known to fit.

    - A batch that fits by what is known of another one (see `room_for_longer`) needs nothing.
    - Else its rank profiles it, on fake tensors, and rank 0 finds the plan: one that is there already, or new ones, the
      fastest that fits and one that leaves room for batches that are longer yet.
    - Plans change at once to one that has room, even between two micro-batches of one step; they do not differ in when
      gradients are reduced. They change back between two steps, once steps under the plan in use are predicted to have
      lost as much time as two changes take.
    - Where memory runs out on a rank although the plan in use was predicted to have room, all ranks change to the one
      with least memory, and take the micro-batch again. A batch is tried so if it is longer than the profiled one
      and than all that have been run under the plan; others are known to fit. On CPU this is so in the first
      micro-batch of a step alone, when there are no gradients to copy.
    - Validation batches whose tensors are like those of training are treated likewise; `training_step` tells what
      forward takes for them. The plan is back when validation ends. Where none is known to have room, the one with
      least memory is tried.

    It stands before all callbacks but `Racing`. A race ends where a batch is too long for the plan in use.

    Attributes:
        number: number of the plan in use, 0 for the usual one.
        learned_s: seconds that training has waited while plans for longer batches were found.
    """

    def __init__(self, trainer: pl.Trainer, units: Units, profiler: BatchProfiler, racing: Racing | None) -> None:
        plan, profile = units.sharded.plan, units.choice.profile
        assert plan is not None
        assert profile is not None
        self._units, self._profiler, self._racing, self._tries = units, profiler, racing, SecondTries(units)
        self._profiles: list[ModelProfile] = [profile]  # of known batches; those after the first on rank 0 alone
        self._known = KnownBatches((KnownBatch(on_rank_zero(lambda: profiler.shapes), plan.micro_batch_size, ()),))
        self._begin_with(plan)
        self._global_step = trainer.global_step
        self._is_between, self._is_refused = True, False
        self._has_given_up = self._ignores_validation = False
        self._change_s, self._number_before = 0.0, 0
        self.learned_s = 0.0

    def _begin_with(self, plan: Plan) -> None:
        """Takes the plan in use for the usual one: it has room for the batch that was profiled first.

        Other batches are profiled anew when they come, for a plan may have choices of blocks that none before had.
        """
        self._plans: tuple[Plan, ...] = (plan,)
        self.number, self._lost_s = 0, 0.0
        self._usual_s: tuple[float, ...] = ()  # of a usual step under plans, as far as that was of use
        self._used = {0}  # plans that have been in use
        self._run: dict[int, RunBatches] = {}  # by number of the plan
        self._known = KnownBatches((dataclasses.replace(self._known.batches[0], rooms=(Room(1.0, 1.0),)),))
        del self._profiles[1:]
        self._rooms: dict[tuple[int, int], Room] = {}  # by known batch and plan, on rank 0

    @property
    def _model(self) -> ReusableModel:
        assert self._units.model is not None
        return self._units.model

    def begin(self, trainer: pl.Trainer) -> None:
        """Begins; a race that goes on, if there is one, begins afterwards."""
        all_callbacks(trainer).insert(0, self)
        self._tries.begin(trainer)

    def go_back(self) -> None:
        """Changes to the usual plan, at the end of a fit; if that is refused, the next fit does so."""
        if not self._plan_is_own:
            self._begin_on_another()
        elif self.number:
            self._change(0)

    def end(self, trainer: pl.Trainer) -> None:
        """Leaves the Trainer, at the end of a fit or after an error."""
        callbacks = all_callbacks(trainer)
        callbacks[:] = [callback for callback in callbacks if callback is not self]
        self._tries.end(trainer)

    @property
    def _plan_is_own(self) -> bool:
        """False where a race, or `change_plan`, has changed the plan since."""
        return self._model.sharded.plan is self._plans[self.number]

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._tries.fall_back = None
        if self._has_given_up:
            return
        if not self._plan_is_own:
            self._begin_on_another()
        shapes, run = shapes_of(batch), self._run_here
        wants_back = trainer.is_global_zero and self._lost_s > _NUM_CHANGES * self._change_s
        number, is_going_back, is_tried = self._model.sharded.largest(
            [self._known.plan_for(shapes), int(wants_back), int(not run.has_room(shapes))]
        )
        if number and self._is_in_race:
            assert self._racing is not None
            self._racing.give_up(trainer, "batches became longer")
            self._begin_on_another()
            (number,) = self._model.sharded.largest([self._known.plan_for(shapes)])
        if number == self._known.num_plans:
            began_s = time.perf_counter()
            number = self._learn(trainer, batch, shapes, evaluates=False)
            self.learned_s += time.perf_counter() - began_s
        if number > self.number or (number < self.number and is_going_back and self._is_between):
            self._change(number)
        elif number < self.number and self._is_between:
            self._lost_s += self._usual_s[self.number] - self._usual_s[number]
        if self._is_in_race:  # which goes back by itself
            return
        if self._run_here is not run:  # under another plan than ranks were asked about
            (is_tried,) = self._model.sharded.largest([not self._run_here.has_room(shapes)])
        is_longest = self._known.plan_for(shapes) == self.number and not self._run_here.has_room(shapes)
        self._run[self.number] = self._run_here.after(shapes)
        is_on_host = trainer.strategy.root_device.type == "cpu"  # where copies of gradients would pass the limit
        if is_tried and (self._is_between or not is_on_host):
            self._tries.fall_back = partial(self._fall_back, trainer, shapes if is_longest else None)

    @property
    def _run_here(self) -> RunBatches:
        """Batches that have been run under the plan in use; usual ones count as such."""
        return self._run.setdefault(self.number, RunBatches((self._known.batches[0].shapes,)))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._is_between = trainer.global_step != self._global_step  # else gradients accumulate
        self._global_step = trainer.global_step

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._number_before = self.number

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._ignores_validation or self._is_in_race or not self._plan_is_own:
            return
        shapes = shapes_of(batch)
        (number,) = self._model.sharded.largest([self._needed(shapes, evaluates=True)])
        if number == self._known.num_plans:
            number = self._learn(trainer, batch, shapes, evaluates=True)
        if number > self.number:
            self._change(number)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._plan_is_own and self.number != self._number_before:
            self._change(self._number_before)

    def _needed(self, shapes: Shapes, *, evaluates: bool) -> int:
        """Number of the plan that a batch needs; where nothing is to be learned of a validation batch, the best try."""
        known = self._known
        number = known.plan_for(shapes, evaluates=evaluates)
        if not evaluates or number < known.num_plans:
            return number
        times = [times_longer(shapes, each.shapes) for each in known.batches]
        if min(times) == math.inf:
            return self.number  # training_step could not take it
        return known.num_plans - 1 if any(each.shapes == shapes for each in known.batches) else known.num_plans

    @property
    def _is_in_race(self) -> bool:
        return self._racing is not None and not self._racing.is_over

    def _begin_on_another(self) -> None:
        """Begins anew after a race, or `change_plan`, has changed the plan, which training then does not leave."""
        plan = self._model.sharded.plan
        assert plan is not None
        if self.number and self._model.lasting is self._plans[0]:  # under the usual one, a race has set what lasts
            self._model.lasting = None
        self._begin_with(plan)

    def _change(self, number: int) -> bool:
        """Changes the plan; where it cannot change now, the one in use stays on all ranks, which is said once."""
        began_s, model = time.perf_counter(), self._model
        try:
            model.sharded.use(self._plans[number], in_window=True, is_known=number in self._used)
        except ConfigurationError as error:  # the same on all ranks
            if not self._is_refused:
                rank_zero_warn(f"OSDP: for batches of another length the plan in use cannot change: {error}")
            self._is_refused = True
            return False
        self._used.add(number)
        usual, plan = self._plans[0], model.sharded.plan
        assert plan is not None
        self._plans = (*self._plans[:number], plan, *self._plans[number + 1 :])
        self.number, self._lost_s, self._change_s = number, 0.0, time.perf_counter() - began_s
        if number and model.lasting is None:
            model.lasting = usual
        elif not number and model.lasting is usual:
            model.lasting = None
        return True

    def _fall_back(self, trainer: pl.Trainer, shapes: Shapes | None, why: str) -> None:
        """Changes to the plan with least memory in a micro-batch for which the one in use has turned out to have none.

        Args:
            trainer: whose micro-batch it is.
            shapes: of this rank's batch; None unless it is the plan for such ones, and none has been run under it.
            why: which rank ran out of memory, and where.

        Raises:
            InfeasibleError: the plan in use is the one with least memory.
            OSDPError: it cannot change in the middle of this step.
        """
        too_long, number = [each for each in all_gather_values(shapes) if each is not None], self.number
        self._take(on_rank_zero(partial(self._with_least, trainer, too_long, why)))
        if not self._change(len(self._plans) - 1):
            raise OSDPError(
                f"{why[0].upper()}{why[1:]} on a longer batch than any so far, and the plan cannot change in this step."
                f" Use shorter or smaller batches, or a lower memory_limit.{last_checkpoint(trainer)}"
            )
        del self._run[number]
        if shapes is not None:
            self._run[self.number] = self._run_here.after(shapes)

    def _learn(self, trainer: pl.Trainer, batch: Any, shapes: Shapes, *, evaluates: bool) -> int:
        """Finds the plan for batches that none is known to have room for; returns its number. All ranks call it.

        Raises:
            InfeasibleError: there is none.
        """
        self._take(on_rank_zero(self._looked_up))
        number = self._needed(shapes, evaluates=evaluates)
        lacking = all_gather_values(shapes if number == self._known.num_plans else None)
        first = {each: rank for rank, each in reversed([*enumerate(lacking)]) if each is not None}
        if first:
            own = self._profiled(trainer, batch, shapes) if first.get(shapes) == trainer.global_rank else None
            of_ranks = all_gather_values(own)
            profiled = [each for each in of_ranks if isinstance(each, _Profiled)]
            failed = next((each for each in of_ranks if isinstance(each, str)), None)
            if failed is None and len(self._known.batches) + len(profiled) > MOST_PROFILED:
                failed = f"more than {MOST_PROFILED} of them have been profiled"
            if failed is not None:
                self._ignores_validation, self._has_given_up = True, not evaluates
                kind = "validation batches" if evaluates else "batches"
                rank_zero_warn(f"OSDP: {kind} longer than those so far are run as they come from now on, for {failed}")
                return self._known.num_plans - 1
            self._take(on_rank_zero(partial(self._planned, trainer, profiled, evaluates=evaluates)))
        (number,) = self._model.sharded.largest([self._needed(shapes, evaluates=evaluates)])
        return number

    def _take(self, found: _Found) -> None:
        # plans that were there stay the objects that they are
        self._plans = (*self._plans, *found.plans[len(self._plans) :])
        self._known, self._usual_s = found.known, found.usual_s

    def _looked_up(self) -> _Found:
        """Plans and batches that are there, with rooms that were not needed before; on rank 0."""
        return self._judged(self._plans, self._known, self._usual_s)

    def _judged(self, plans: tuple[Plan, ...], known: KnownBatches, usual_s: tuple[float, ...]) -> _Found:
        """Finds which plans have room for known batches, and the seconds of those that have none yet; on rank 0."""
        cluster = self._units.choice.cluster
        assert cluster is not None
        for place, batch in enumerate(known.batches):
            for number, plan in enumerate(plans):
                if (place, number) not in self._rooms:
                    room = room_for_longer(plan, self._profiles[place], cluster, num_samples=batch.num_samples)
                    if place == number == 0:  # whatever is predicted by now, the usual plan was made for the first one
                        room = Room(*(max(1.0, each) for each in room))
                    self._rooms[place, number] = room
        rooms = [[self._rooms[place, number] for number in range(len(plans))] for place in range(len(known.batches))]
        usual = self._profiles[0]
        more_s = (simulate(plan.as_profiled(usual), usual, cluster).time_s for plan in plans[len(usual_s) :])
        return _Found(plans, known.under(rooms), (*usual_s, *more_s))

    def _with_least(self, trainer: pl.Trainer, too_long: Sequence[Shapes], why: str) -> _Found:
        """Plans with the one that takes least memory last, and without room for these batches up to the one in use."""
        cluster, longest = self._units.choice.cluster, self._known.batches[-1]
        assert cluster is not None
        usual, least, engine = self._plans[0], self._plans[-1], self._units.options.engine
        found = thriftiest(usual, self._profiles[-1], cluster, num_samples=longest.num_samples, engine=engine)
        plans = self._plans if _how_it_runs(found) == _how_it_runs(least) else (*self._plans, found)
        if self.number == len(plans) - 1:
            raise InfeasibleError(
                f"{why[0].upper()}{why[1:]} on a longer batch than any so far, and no plan takes less memory than the"
                " one in use. Use shorter or smaller batches or more ranks, and resume from a checkpoint."
                f"{last_checkpoint(trainer)}"
            )
        for place, number in self._rooms:
            for each in too_long if number <= self.number else ():
                times = times_longer(each, self._known.batches[place].shapes)
                self._rooms[place, number] = self._rooms[place, number].below(times)
        rank_zero_warn(
            f"OSDP: {why} on a longer batch than any so far, for which more memory was predicted to be free than there"
            " was. All ranks take the step again under the plan with least memory, and others with such batches."
        )
        return self._judged(plans, self._known, self._usual_s)

    def _profiled(self, trainer: pl.Trainer, batch: Any, shapes: Shapes) -> _Profiled | str:
        """Profiles a batch of this rank, or says why that is impossible."""
        num_samples = samples_in(batch, (self._plans[0].micro_batch_size,))
        try:
            profile = self._profiler.profile(batch, num_samples, self._plans[0])
        except Exception as error:  # the user's step may raise any
            raise_if_fatal(error)
            return f"one on rank {trainer.global_rank} cannot be profiled: {type(error).__name__}: {error}"
        return _Profiled(trainer.global_rank, shapes, num_samples, profile)

    def _planned(self, trainer: pl.Trainer, profiled: Sequence[_Profiled], *, evaluates: bool) -> _Found:
        """Finds plans that have room for each of these batches, and perhaps for longer ones; on rank 0.

        Raises:
            InfeasibleError: not even the plan with least memory has room for one of them.
        """
        cluster, found = self._units.choice.cluster, self._looked_up()
        assert cluster is not None
        for each in profiled:
            batch = KnownBatch(each.shapes, each.num_samples, (Room(0.0, 0.0),) * len(found.plans))
            self._profiles.append(each.profile)
            batches = (*found.known.batches, batch)
            found = self._judged(found.plans, dataclasses.replace(found.known, batches=batches), found.usual_s)
            if found.known.plan_for(each.shapes, evaluates=evaluates) < len(found.plans):
                continue
            usual = self._plans[0]
            engine, num_samples = self._units.options.engine, each.num_samples
            plan, *roomier = thriftier(usual, each.profile, cluster, num_samples=num_samples, engine=engine)
            if plan.peak_bytes > usual.memory_limit_bytes and not evaluates:
                raise InfeasibleError(_infeasible(each, plan) + last_checkpoint(trainer))
            kind, taken_bytes = ("", plan.peak_bytes) if not evaluates else ("validation ", plan.evaluation_peak_bytes)
            changes = keeping_less(usual, plan)
            how = f": {changes}" if changes else ""
            rank_zero_info(
                f"OSDP: a {kind}batch of rank {each.rank} ({_text(each.shapes)}) is longer than the plan has room for:"
                f" all ranks change to one that is predicted to take {format_bytes(taken_bytes)} of"
                f" {format_bytes(plan.memory_limit_bytes)} for it{how}, and back for shorter ones."
            )
            found = self._judged((*found.plans, plan, *roomier), found.known, found.usual_s)
        return found


def _how_it_runs(plan: Plan) -> object:
    blocks = {(block.name, block.treatment, block.kept) for block in plan.blocks}
    return [unit.treatments for unit in plan.units], blocks, engine_of(plan)


def _infeasible(batch: _Profiled, plan: Plan) -> str:
    limit = format_bytes(plan.memory_limit_bytes)
    return (
        f"Expected a plan that has room for the next step, but rank {batch.rank} has a batch ({_text(batch.shapes)})"
        f" for which the one with least memory is predicted to take {format_bytes(plan.peak_bytes)}, more than"
        f" memory_limit ({limit}). Use shorter or smaller batches, a higher memory_limit or more ranks, and resume from"
        " a checkpoint; OSDPStrategy(longer_batches=False) tries the step all the same."
    )


def _text(shapes: Shapes) -> str:
    shown = ", ".join(f"{dtype.removeprefix('torch.')} {[*shape]}" for dtype, shape in shapes[:_MOST_SHOWN])
    return shown + (f" and {len(shapes) - _MOST_SHOWN} tensors more" if len(shapes) > _MOST_SHOWN else "")


def longer_batches_of(trainer: pl.Trainer, units: Units, racing: Racing | None) -> LongerBatches | None:
    """Changes of plans for longer batches in a fit that was planned for; None for others, and where users want none."""
    later = units.choice.later
    return None if later is None or units.sharded.plan is None else LongerBatches(trainer, units, later, racing)
