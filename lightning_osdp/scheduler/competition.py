"""What competes at one micro-batch size: prefetch settings, units of an operator or of a block, slices, recomputing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

from lightning_osdp.assign import (
    NO_GAIN,
    Assignment,
    Modes,
    Setting,
    as_far_as_fits,
    assign_ahead,
    assigned_as,
    block_units,
    chosen_activations,
    ever_more_slices,
    join_units,
    share_units,
)
from lightning_osdp.core.axes import ZDP, modes_of
from lightning_osdp.core.plans.search_space import SearchSpace

_least_bytes = attrgetter("costs.least_bytes")
_step_time_s = attrgetter("step_time_s")


def _least_s(setting: Setting) -> float:
    """Seconds of the step as if memory were no concern."""
    return setting.costs.step_time_s(setting.costs.additive.fastest_modes)


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
        for found in (self._recomputing(first), self._split(first), self._split_recomputing(first)):
            if best.costs.least_bytes <= self.memory_limit_bytes:
                break
            best = min((best, *found), key=_least_bytes)
        return best.ideal

    def assigned(self, settings: Sequence[Setting]) -> list[Assignment]:
        """The best modes of each setting that fits."""
        found: list[Assignment] = []
        for setting in (*settings, *self._by_block(settings)):
            found += self._assigned(setting, found)
        fastest = min(found, key=_step_time_s, default=None)
        if fastest is not None and fastest.step_time_s <= _least_s(fastest.setting.all_ahead) * (1 + NO_GAIN):
            return found
        engine = None if fastest is None else fastest.setting.all_ahead.engine
        smallest = min(settings, key=_least_bytes)
        base = next((each for each in settings if each.engine == engine), smallest)
        for each in self._split(base):
            found += self._assigned(each, found)
        return found + self._with_recomputing(base, found)

    def plain(self, setting: Setting) -> Iterator[tuple[Setting, Modes]]:
        """Plain FSDP: nothing is kept after forward, and activations are kept or blocks recompute all of them.

        With several micro-batches, gradients are reduced in each or, where that is offered, in the last one.
        """
        # ZDP in every micro-batch, whether it was offered or not
        setting = replace(setting, modes=modes_of([ZDP.name], {"every", *(mode["reduce"] for mode in setting.modes)}))
        for each in self._keeping_and_recomputing(setting):
            yield each, each.all_zdp_modes
            last = tuple(options[-1] for options in each.costs.options)
            if last != each.all_zdp_modes:
                yield each, last

    def alike(self, settings: Sequence[Setting]) -> Iterator[tuple[Setting, Modes]]:
        """What people choose by hand: all units in one mode, each a block where there are any, else an operator."""
        for setting in self._by_block(settings) or settings:
            for each in self._keeping_and_recomputing(setting):
                yield from ((each, modes) for modes in each.costs.alike())

    def assigned_alike(self, settings: Sequence[Setting], worth_s: float) -> Assignment | None:
        """The fastest of these that fits, where it takes less than ``worth_s``."""
        timed = [(setting.costs.step_time_s(modes), setting, modes) for setting, modes in self.alike(settings)]
        best: Assignment | None = None
        for time_s, setting, modes in sorted(timed, key=itemgetter(0)):
            if time_s >= worth_s * (1 - NO_GAIN):
                break
            if setting.ideal.costs.exact_peak(modes).peak_bytes > self.memory_limit_bytes:
                continue
            chosen = as_far_as_fits(setting, modes, memory_limit_bytes=self.memory_limit_bytes)
            if chosen is not None and chosen.costs.step_time_s(modes) < worth_s * (1 - NO_GAIN):
                best = assigned_as(chosen, modes, bound_s=None)
                worth_s = best.step_time_s
        return best

    def _keeping_and_recomputing(self, setting: Setting) -> Iterator[Setting]:
        """With blocks that keep what they save, and where they may with such as recompute all of it."""
        yield setting
        recomputing = {block.name: "recompute" for block in setting.profile.blocks if "recompute" in block.segments}
        if "recompute" in self.space.activations and recomputing and not setting.is_paper:
            yield setting.with_blocks(recomputing)

    def shared(self, setting: Setting, modes: Modes) -> tuple[Setting, Modes]:
        """The same with units shared, where they may be."""
        if not self.space.share_units:
            return setting, modes
        return share_units(setting, modes, memory_limit_bytes=self.memory_limit_bytes)

    def _by_block(self, settings: Sequence[Setting]) -> list[Setting]:
        """The same with a unit for each block, where units may be shared."""
        plain = [setting for setting in settings if self.space.share_units and not setting.is_paper]
        return [by_block for setting in plain for by_block in block_units(setting)]

    def _split(self, setting: Setting) -> Iterator[Setting]:
        """The same with operators split, where that can help."""
        if setting.cluster.world_size == 1 or len(self.space.slices) == 1:
            return
        peak = setting.costs.peak(setting.costs.least_memory_modes)
        whole = sum(peak.parts.get(part, 0) for part in ("gathered parameters", "unsharded gradients"))
        if peak.peak_bytes - whole <= self.memory_limit_bytes:
            yield from ever_more_slices(setting, self.space.slices)

    def _all_blocks(self, setting: Setting) -> list[dict[str, str]]:
        """For each choice but to keep what they save, all blocks that may make it."""
        if setting.is_paper:
            return []
        chosen = (
            {block.name: choice for block in setting.profile.blocks if choice in block.segments}
            for choice in self.space.activations
            if choice != "keep"
        )
        return [blocks for blocks in chosen if blocks]

    def _recomputing(self, setting: Setting) -> Iterator[Setting]:
        """The same with blocks that may save less: units of their own, and all of them, with units inside, too.

        Where units may not be shared, only with units inside.
        """
        every = self._all_blocks(setting)
        if not every:
            return
        bases = [setting]
        if self.space.share_units:
            yield from block_units(setting, self.space.activations)
            bases += block_units(setting)
        for blocks in every:
            yield from (each.with_blocks(blocks) for each in bases)

    def _split_recomputing(self, setting: Setting) -> Iterator[Setting]:
        """The same with all blocks saving less, with units inside, of which some are split."""
        for blocks in self._all_blocks(setting):
            yield from self._split(setting.with_blocks(blocks))

    def _with_recomputing(self, setting: Setting, before: Sequence[Assignment]) -> list[Assignment]:
        """The best with blocks that recompute or offload.

        First as units of their own; then, as chosen there or all of them, with units inside, which may be split: all of
        them, too, where only that makes them fit.
        """
        found: list[Assignment] = []
        tried: list[dict[str, str]] = []
        settings = list(self._recomputing(setting))
        for each in settings:
            assigned = self._assigned(each, [*before, *found])
            found += assigned
            chosen = (chosen_activations(one.setting, one.modes) for one in assigned)
            tried += [blocks for blocks in chosen if blocks and blocks not in tried]
        tried += [blocks for blocks in self._all_blocks(setting) if blocks not in tried]
        for blocks in tried:
            fine = setting.with_blocks(blocks)
            if all(fine.decided.blocks != each.decided.blocks for each in settings):
                found += self._assigned(fine, [*before, *found])
            for split in self._split(fine):
                found += self._assigned(split, [*before, *found])
        return found

    def _assigned(self, setting: Setting, before: Sequence[Assignment]) -> list[Assignment]:
        """The best modes of a setting, and of those that its units shared make of it where that is faster.

        Where memory is short, what keeping units saves may be less than what sharing them would have saved: so units
        are shared as if all were sharded, too.
        """
        worth_s = min(map(_step_time_s, before), default=math.inf)
        assigned = self._assigned_ahead(setting, worth_s)
        if assigned is None:
            return []
        found = [assigned]
        # where not all fits that may be gathered ahead, units are shared as if that took no memory
        base = setting if assigned.setting.engine == setting.engine else setting.ideal
        for modes in (assigned.modes, setting.costs.least_memory_modes) if self.space.share_units else ():
            shared = self.shared(base, modes)
            for merged, modes_of_merged in (shared, join_units(*shared, memory_limit_bytes=self.memory_limit_bytes)):
                if merged is not base and all(merged.units != other.setting.units for other in found):
                    found += self._again(merged.all_ahead, modes_of_merged, min(worth_s, *map(_step_time_s, found)))
        return found

    def _assigned_ahead(self, setting: Setting, worth_s: float) -> Assignment | None:
        return assign_ahead(setting, memory_limit_bytes=self.memory_limit_bytes, search=self.search, worth_s=worth_s)

    def _again(self, setting: Setting, modes: Modes, worth_s: float) -> list[Assignment]:
        """The best modes of units that were made with these, or these, which fit though the closed form may exceed."""
        again = self._assigned_ahead(setting, worth_s)
        found = [] if again is None else [again]
        time_s = setting.costs.step_time_s(modes)
        if time_s < worth_s and (again is None or time_s < again.step_time_s * (1 - NO_GAIN)):
            chosen = as_far_as_fits(setting, modes, memory_limit_bytes=self.memory_limit_bytes)
            if chosen is not None:
                found.append(assigned_as(chosen, modes, bound_s=None if again is None else again.bound_s))
        return found
