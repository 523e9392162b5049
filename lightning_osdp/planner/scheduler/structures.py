"""Structures: what is decided before treatments, and the order in which structures are tried.

A structure says which modules are units, which blocks stand alone or have their treatment decided beforehand, and which
operators are in slices. Each makes settings of those that there are, and the best treatments of each setting compete.
Later structures ask what was found with earlier ones. Units that share a
mode may be made one once others have been found, see `assign.merging`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import NamedTuple

from lightning_osdp.core.axes import LEVELS, NODE_STATIONARY, STATIONARY, ZDP, Treatment
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.assign import (
    NO_GAIN,
    Assignment,
    LeastSeconds,
    Setting,
    apart_units,
    block_units,
    bound_in_s,
    bound_of_larger_s,
    chosen_activations,
    ever_more_slices,
    pair_units,
    trained_together,
)
from lightning_osdp.planner.assign.merging.slices import WORTH_SPLITTING
from lightning_osdp.planner.engine import effects_of

WORTH_TRYING = 0.02
"""Fraction of a step time by which plans that follow from a setting may be faster than the setting's bound: those with
units inside of its blocks, and those that fill the room that the closed form of the peak leaves."""

WORTH_SLICING = 1e-3
"""Fraction of a step time by which slices must be able to make steps faster to be tried, unless nothing fits else."""

MOST_TRIED = 256
"""Settings that are tried at one micro-batch size, at most: what is left then is not looked at."""


class Tried(NamedTuple):
    """Setting that was tried."""

    structure: str
    num_units: int
    time_s: float | None
    """The step time of its best treatments; None where none fit, or are worth it."""


class Bound(NamedTuple):
    """Setting with the seconds that no modes of the setting go below."""

    setting: Setting
    seconds: float
    """Infinite where no modes fit."""
    least_s: float = 0.0
    """Seconds that no plan of the same samples goes below, whatever its setting."""
    has_followers: bool = True
    """False where what follows from the setting was searched as well."""

    @property
    def with_followers_s(self) -> float:
        """Seconds that plans do not go below that follow from the setting, with the setting itself.

        Structures with its units shared save no more than being apart takes; others are taken to save `WORTH_TRYING`.
        """
        if not self.has_followers:
            return self.seconds
        return max(self.least_s, self.seconds * (1 - WORTH_TRYING) - self.setting.costs.apart_s)


@dataclass(kw_only=True)
class Attempt:
    """Settings that were given, and assignments found so far."""

    settings: Sequence[Setting]
    """A unit for each operator, with each setting of prefetching."""
    space: SearchSpace
    memory_limit_bytes: int
    worth_s: float = math.inf
    """A step time of no use: a plan of another micro-batch size has as many samples/s."""
    known: Mapping[Hashable, Bound] = field(default_factory=dict)
    """Bounds of settings at a smaller micro-batch, by `Setting.key`."""
    least: LeastSeconds | None = None
    """Least seconds of any plan of the model; None: nothing is known of them."""
    assignments: list[Assignment] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    """All settings so far, searched or not, without what their costs have worked out: they outlive this."""
    log: list[Tried] = field(default_factory=list)
    decided: list[Mapping[str, str]] = field(default_factory=list)
    """Decisions on blocks in each setting that was tried."""

    @cached_property
    def is_fastest(self) -> bool:
        """True where nothing can be faster than what was found by the time of asking, as if memory were no concern."""
        fastest = min(self.assignments, key=attrgetter("step_time_s"), default=None)
        if fastest is None:
            return False
        # pairs and columns that move activations may be faster than their operators, and fit where their weights do not
        settings = (fastest.setting, *(pair for each in self.settings for pair in pair_units(each)))
        every = [each.all_ahead.costs for each in settings]
        least_s = min(costs.step_time_s(costs.additive.fastest_modes) for costs in every)
        return fastest.step_time_s <= least_s * (1 + NO_GAIN)

    @cached_property
    def base(self) -> Setting:
        """A unit for each operator, with the prefetching of the fastest that was found when it is first asked for."""
        fastest = min(self.assignments, key=attrgetter("step_time_s"), default=None)
        engine = None if fastest is None else fastest.setting.all_ahead.engine
        smallest = min(self.settings, key=attrgetter("costs.least_bytes"))
        return next((each for each in self.settings if each.engine == engine), smallest)

    @property
    def best_s(self) -> float:
        """Step time that plans have to go below to be of use."""
        return min([self.worth_s, *(each.step_time_s for each in self.assignments)])

    def bound(self, setting: Setting) -> Bound:
        """The bound of a setting by what is known before it is searched."""
        smaller, samples = self.known.get(setting.key), setting.workload.micro_batch_size
        least_s = 0.0 if self.least is None else self.least.step_s(samples)
        if not setting.costs.has_room_on_host:
            return Bound(setting, math.inf, least_s)
        if smaller is None or self.least is None:
            return Bound(setting, max(least_s, setting.costs.least_s), least_s)
        if smaller.seconds == math.inf:
            return Bound(setting, math.inf, least_s)
        return Bound(setting, bound_of_larger_s(smaller.setting, smaller.seconds, samples, self.least), least_s)

    def may_win(self, bound: Bound) -> bool:
        """Tells if the setting, or what follows from it, may be of use."""
        return bound.with_followers_s < self.best_s

    def leave_out(self, bound: Bound) -> None:
        """Takes a bound of a setting of which no more is searched."""
        self.bounds.append(bound._replace(setting=replace(bound.setting)))

    def note(self, structure: Structure, setting: Setting, assigned: Sequence[Assignment]) -> None:
        """Takes what was found with a setting."""
        for each in assigned:
            bound = Bound(each.setting.all_ahead, each.bound_s)
            self.leave_out(bound._replace(has_followers=not self.may_win(bound)))
        if not assigned:
            self.leave_out(Bound(setting, math.inf))
        self.assignments += assigned
        self.decided.append(setting.decided.blocks)
        time_s = min((each.step_time_s for each in assigned), default=None)
        self.log.append(Tried(structure.name, len(setting.units), time_s))


class Structure(NamedTuple):
    """One way to make settings."""

    name: str
    make: Callable[[Attempt], Iterator[Setting]]
    is_worth_it: Callable[[Attempt], bool]


def _always(_: Attempt) -> bool:
    return True


def _may_be_faster(attempt: Attempt) -> bool:
    return not attempt.is_fastest


def operators(attempt: Attempt) -> Iterator[Setting]:
    """A unit for each operator."""
    yield from attempt.settings


def blocks(attempt: Attempt) -> Iterator[Setting]:
    """A unit for each block, where units may be shared."""
    for setting in attempt.settings:
        if attempt.space.share_units and not setting.is_paper:
            yield from block_units(setting)


def frozen_apart(attempt: Attempt) -> Iterator[Setting]:
    """A unit for each operator of those that would share one though some are frozen and others trained."""
    for setting in attempt.settings:
        yield from _apart(attempt, setting)


def pairs(attempt: Attempt) -> Iterator[Setting]:
    """A unit for each operator, but one for each pair, or columns of one input, whose activations can move.

    Then one for those of them alone that were found to move theirs.
    """
    for setting in attempt.settings:
        yield from pair_units(setting)
    moving = (unit for one in attempt.assignments for unit in _moving(one) if len(unit.operators) > 1)
    found = tuple(dict.fromkeys(unit.name for unit in moving))
    for setting in attempt.settings if found else ():
        for some, every in zip(pair_units(setting, found), pair_units(setting), strict=True):
            if len(some.units) > len(every.units):
                yield some


def moving(attempt: Attempt) -> Iterator[Setting]:
    """Operators and pairs that move activations whatever it takes: those found best so, those that send less, or all.

    Weights that they would else gather need not fit. Without a choice of theirs, bytes that others may hold are known
    exactly.
    """
    tried = set[tuple[int, Treatment, frozenset[str]]]()
    settings = (*pair_units(attempt.base), attempt.base) if _moves_activations(attempt) else ()
    for setting, mode in product(settings, (STATIONARY, NODE_STATIONARY)):
        costs = setting.costs
        may = {
            unit.name: costs.times_s[place][mode] <= costs.times_s[place][ZDP]
            for place, unit in enumerate(setting.units)
            if mode in costs.options[place]
        }
        found = {unit.name for one in attempt.assignments for unit in _moving(one)}
        for names in (found & may.keys(), {name for name, sends_less in may.items() if sends_less}, may.keys()):
            moved = frozenset(names)
            if moved and (len(setting.units), mode, moved) not in tried:
                tried.add((len(setting.units), mode, moved))
                yield replace(setting, moving=moved, moving_mode=mode)


def adapters_together(attempt: Attempt) -> Iterator[Setting]:
    """A unit for each frozen operator, and one for all that is trained, where units may be shared."""
    for setting in attempt.settings:
        if attempt.space.share_units and _may_be_apart(attempt, setting):
            yield from trained_together(setting)


def slices(attempt: Attempt) -> Iterator[Setting]:
    """A unit for each operator, of which some are split."""
    yield from _split(attempt, attempt.base)


def saving_blocks(attempt: Attempt) -> Iterator[Setting]:
    """Blocks that may save less: units of their own, each as it likes; then all of them, with units inside, too.

    Where units may not be shared, only with units inside. Levels are tried beside the same without them: where links
    decide, a search with more choices may end at a slower step.
    """
    setting = attempt.base
    every = _all_alike(attempt, setting)
    if not every:
        return
    bases = [setting, *_apart(attempt, setting)]
    if attempt.space.share_units:
        without_levels = tuple(value for value in attempt.space.saves if value not in LEVELS)
        for saves in dict.fromkeys((without_levels, attempt.space.saves)):
            yield from block_units(setting, saves)
        bases += block_units(setting)
    for chosen in every:
        yield from (each.with_blocks(chosen) for each in bases)


def inside_of_saving_blocks(attempt: Attempt) -> Iterator[Setting]:
    """Blocks that save less as was found best, with a unit for each operator inside."""
    for chosen in _found_blocks(attempt):
        if chosen not in attempt.decided:
            yield attempt.base.with_blocks(chosen)


def slices_inside_of_saving_blocks(attempt: Attempt) -> Iterator[Setting]:
    """Blocks that save less as in the fastest assignment found, or all blocks, with some of the operators split.

    Blocks at levels recompute everything: levels count the operations of whole operators.
    """
    setting = attempt.base
    every = _all_alike(attempt, setting)
    instead = dict.fromkeys(LEVELS, "recompute") if "recompute" in attempt.space.saves else {}
    found = [
        {name: instead.get(saves, saves) for name, saves in chosen.items()} for chosen in _found_blocks(attempt)[:1]
    ]
    for chosen in (*found, *(each for each in every if each not in found)):
        if {*LEVELS}.isdisjoint(chosen.values()):
            yield from _split(attempt, setting.with_blocks(chosen))


def _moves_activations(attempt: Attempt) -> bool:
    return any(effects_of(mode).exchanges for setting in attempt.settings for mode in setting.modes)


STRUCTURES = (
    Structure("operators", operators, _always),
    Structure("frozen units apart", frozen_apart, _always),
    Structure("adapters together", adapters_together, _always),
    Structure("blocks", blocks, _always),
    Structure("pairs and columns that may move activations", pairs, _moves_activations),
    Structure(
        "what moves activations", moving, lambda attempt: _moves_activations(attempt) and _may_be_faster(attempt)
    ),
    Structure("blocks that save less", saving_blocks, _may_be_faster),
    Structure("units inside of them", inside_of_saving_blocks, _may_be_faster),
    Structure("slices", slices, _may_be_faster),
    Structure("slices inside of blocks that save less", slices_inside_of_saving_blocks, _may_be_faster),
)
"""Structures in the order in which they are tried."""

SMALLER = tuple(
    each for each in STRUCTURES if each.make in {moving, saving_blocks, slices, slices_inside_of_saving_blocks}
)
"""Structures that may take fewer bytes than a unit for each operator, in the order in which they are tried."""


def all_blocks(setting: Setting, choice: str) -> dict[str, str]:
    """Choices of all blocks that may save less in this way; none where that is what they do by themselves."""
    if setting.is_paper or not Treatment(saves=choice):
        return {}
    return {block.name: choice for block in setting.profile.blocks if choice in block.segments}


def _apart(attempt: Attempt, setting: Setting) -> list[Setting]:
    """Setting with frozen units apart, where that may be and nobody has said how large units are."""
    return apart_units(setting) if _may_be_apart(attempt, setting) else []


def _may_be_apart(attempt: Attempt, setting: Setting) -> bool:
    is_of_use = setting.cluster.world_size > 1 or any(effects_of(mode).shard_on_host for mode in setting.modes)
    return attempt.space.min_unit_bytes is None and not setting.is_paper and is_of_use


def _all_alike(attempt: Attempt, setting: Setting) -> list[dict[str, str]]:
    """Choices of all blocks alike.

    Where units may be shared, blocks at levels are left to settings in which each block does as it likes.
    """
    space = attempt.space
    values = [value for value in space.saves if value not in LEVELS or not space.share_units]
    return [chosen for value in values if (chosen := all_blocks(setting, value))]


def _moving(assignment: Assignment) -> list[UnitProfile]:
    """Units that move activations in an assignment."""
    units = zip(assignment.setting.units, assignment.modes, strict=True)
    return [unit for unit, mode in units if effects_of(mode).exchanges]


def _found_blocks(attempt: Attempt) -> list[dict[str, str]]:
    """Choices of blocks in the assignments found, where they were chosen, those of the fastest first."""
    if attempt.base.decided.blocks:
        return []
    fastest = sorted(attempt.assignments, key=attrgetter("step_time_s"))
    found = (chosen_activations(one.setting, one.modes) for one in fastest)
    return [*{tuple(chosen.items()): chosen for chosen in found if chosen}.values()]


def _split(attempt: Attempt, setting: Setting) -> Iterator[Setting]:
    """Settings with operators split, where that can help.

    No number of slices takes more off the peak than the weights and gradients that are whole at that moment.
    """
    choices, limit_bytes = attempt.space.slices, attempt.memory_limit_bytes
    if setting.cluster.world_size == 1 or len(choices) == 1:
        return
    peak = setting.costs.peak(setting.costs.least_memory_modes)
    whole = sum(peak.parts.get(part, 0) for part in ("gathered parameters", "unsharded gradients"))
    if whole < peak.peak_bytes * WORTH_SPLITTING or peak.peak_bytes - whole > limit_bytes:
        return
    least_s = bound_in_s(setting, memory_limit_bytes=limit_bytes + whole) if attempt.assignments else 0.0
    if least_s < attempt.best_s * (1 - WORTH_SLICING):
        yield from ever_more_slices(setting, choices)
