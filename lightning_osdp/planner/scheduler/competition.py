"""Competitors at one micro-batch size: the best treatments of each of the `structures`, and plans by hand."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

from lightning_osdp.core.axes import SELECTIVE, ZDP, modes_of
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.planner.assign import (
    NO_GAIN,
    Assignment,
    LeastSeconds,
    Modes,
    Setting,
    as_far_as_fits,
    assign_ahead,
    assignment_of,
    join_units,
    share_units,
)
from lightning_osdp.planner.scheduler.structures import (
    MOST_TRIED,
    SMALLER,
    STRUCTURES,
    Attempt,
    Bound,
    all_blocks,
    blocks,
)

_log = logging.getLogger(__name__)

_least_bytes = attrgetter("costs.least_bytes")


@dataclass(frozen=True, kw_only=True)
class Competition:
    """Assignments of one model in the same memory."""

    memory_limit_bytes: int
    """The most bytes that may live on one rank."""
    search: str
    """Name of a solver in ``search.SOLVERS``."""
    space: SearchSpace

    def smallest(self, settings: Sequence[Setting]) -> Setting:
        """The setting that needs the fewest bytes.

        Where it would not fit else, with blocks that save less, with operators split, or with both.
        """
        first = best = min(settings, key=_least_bytes)
        # to recompute everything takes the fewest bytes
        names = tuple(name for name in self.space.activations if name != SELECTIVE)
        space = replace(self.space, activations=names) if "recompute" in names else self.space
        attempt = Attempt(settings=(first,), space=space, memory_limit_bytes=self.memory_limit_bytes)
        for structure in SMALLER:
            if best.costs.least_bytes <= self.memory_limit_bytes:
                break
            made = (each for each in structure.make(attempt) if each.costs.has_room_on_host)
            best = min((best, *made), key=_least_bytes)
        return best.ahead_for_free

    def assigned(
        self,
        settings: Sequence[Setting],
        *,
        worth_s: float,
        known: Mapping[Hashable, Bound],
        least: LeastSeconds,
    ) -> Attempt:
        """The best modes of each structure that fits and may be of use; some of what fits, where nothing may.

        Args:
            settings: of one workload, with each setting of prefetching.
            worth_s: a step time of no use.
            known: bounds of settings at a smaller micro-batch, by `Setting.key`.
            least: least seconds of any plan of the model.
        """
        attempt = Attempt(
            settings=settings,
            space=self.space,
            memory_limit_bytes=self.memory_limit_bytes,
            worth_s=worth_s,
            known=known,
            least=least,
        )
        for structure in STRUCTURES:
            for setting in structure.make(attempt) if structure.is_worth_it(attempt) else ():
                bound = attempt.bound(setting)
                # as long as nothing was found, all that fits is searched
                if bound.seconds == math.inf or (attempt.assignments and not attempt.may_win(bound)):
                    attempt.leave_out(bound)
                elif len(attempt.log) < MOST_TRIED:
                    attempt.note(structure, setting, self._assigned(setting, attempt))
        _log.debug("tried at micro-batch %d: %s", settings[0].workload.micro_batch_size, attempt.log)
        return attempt

    def plain(self, setting: Setting) -> Iterator[tuple[Setting, Modes]]:
        """Plain FSDP: nothing is kept after forward, and activations are kept or blocks recompute all of them.

        With several micro-batches, gradients are reduced in each or, where that is offered, in the last one.
        """
        # ZDP in every micro-batch, whether it was offered or not
        setting = replace(setting, modes=modes_of([ZDP.name], {"every", *(mode["sync"] for mode in setting.modes)}))
        for each in self._keeping_and_recomputing(setting):
            yield each, each.all_zdp_modes
            last = tuple(options[-1] for options in each.costs.options)
            if last != each.all_zdp_modes:
                yield each, last

    def uniform(self, settings: Sequence[Setting]) -> Iterator[tuple[Setting, Modes]]:
        """Plans by hand: all units in one mode, each a block where there are any, else an operator."""
        attempt = Attempt(settings=settings, space=self.space, memory_limit_bytes=self.memory_limit_bytes)
        for setting in [*blocks(attempt)] or settings:
            for each in self._keeping_and_recomputing(setting):
                yield from ((each, modes) for modes in each.costs.uniform_modes())

    def best_uniform(self, settings: Sequence[Setting], worth_s: float) -> Assignment | None:
        """Fastest of `uniform` that fits, where it takes less than ``worth_s``."""
        timed = [(setting.costs.step_time_s(modes), setting, modes) for setting, modes in self.uniform(settings)]
        best: Assignment | None = None
        for time_s, setting, modes in sorted(timed, key=itemgetter(0)):
            if time_s >= worth_s * (1 - NO_GAIN):
                break
            if not setting.ahead_for_free.costs.fits(modes, self.memory_limit_bytes):
                continue
            chosen = as_far_as_fits(setting, modes, memory_limit_bytes=self.memory_limit_bytes)
            if chosen is not None and chosen.costs.step_time_s(modes) < worth_s * (1 - NO_GAIN):
                best = assignment_of(chosen, modes, bound_s=None)
                worth_s = best.step_time_s
        return best

    def _keeping_and_recomputing(self, setting: Setting) -> Iterator[Setting]:
        """Setting whose blocks keep what they save, and where it may, one whose blocks recompute all of it."""
        yield setting
        recomputing = all_blocks(setting, "recompute")
        if "recompute" in self.space.activations and recomputing:
            yield setting.with_blocks(recomputing)

    def shared(self, setting: Setting, modes: Modes) -> tuple[Setting, Modes]:
        """Setting and modes with units shared, where they may be."""
        if not self.space.share_units:
            return setting, modes
        return share_units(setting, modes, memory_limit_bytes=self.memory_limit_bytes)

    def _assigned(self, setting: Setting, attempt: Attempt) -> list[Assignment]:
        """Best modes of a setting, and of the settings with its units shared where that is faster and may be of use.

        Where memory is short, what keeping units saves may be less than what sharing them would have saved: so units
        are shared as if all were sharded, too.
        """
        assigned = self._assigned_ahead(setting, attempt, ())
        if assigned is None:
            return []
        found = [assigned]
        if assigned.bound_s - setting.costs.apart_s >= attempt.best_s:
            return found
        # where not all fits that may be gathered ahead, units are shared as if that took no memory
        base = setting if assigned.setting.engine == setting.engine else setting.ahead_for_free
        for modes in (assigned.modes, setting.costs.least_memory_modes) if self.space.share_units else ():
            shared = self.shared(base, modes)
            for merged, modes_of_merged in (shared, join_units(*shared, memory_limit_bytes=self.memory_limit_bytes)):
                if merged is not base and all(merged.units != other.setting.units for other in found):
                    found += self._again(merged.all_ahead, modes_of_merged, attempt, found)
        return found

    def _assigned_ahead(self, setting: Setting, attempt: Attempt, found: Sequence[Assignment]) -> Assignment | None:
        """Best modes of a setting after others, which say what is worth finding, and what bound is."""
        return assign_ahead(
            setting,
            memory_limit_bytes=self.memory_limit_bytes,
            search=self.search,
            worth_s=min([attempt.best_s, *(each.step_time_s for each in found)]),
            floor_s=min([*(each.bound_s for each in (*attempt.assignments, *found)), math.inf]),
        )

    def _again(
        self, setting: Setting, modes: Modes, attempt: Attempt, before: Sequence[Assignment]
    ) -> list[Assignment]:
        """Best modes of units that were merged, or the given modes, which fit though the closed form may exceed."""
        again = self._assigned_ahead(setting, attempt, before)
        worth_s = min([attempt.best_s, *(each.step_time_s for each in before)])
        found = [] if again is None else [again]
        time_s = setting.costs.step_time_s(modes)
        if time_s < worth_s and (again is None or time_s < again.step_time_s * (1 - NO_GAIN)):
            chosen = as_far_as_fits(setting, modes, memory_limit_bytes=self.memory_limit_bytes)
            if chosen is not None:
                found.append(assignment_of(chosen, modes, bound_s=None if again is None else again.bound_s))
        return found
