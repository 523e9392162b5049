"""Units of one mode that follow each other made one unit of several modules, where that is faster and still fits.

One all-gather takes the place of two, and the unit stays gathered from the first call of its modules to the last.
Trained units follow each other, too, where only frozen ones are between them, as between adapters.
Equal pairs of units are joined together, and pairs of pairs after that, so that equal blocks are treated alike.

As in `share`, this is outside the space that the certified gap is about: it can only make a plan faster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter

from lightning_osdp.core.units import UnitProfile, apart, joined, may_join, next_to
from lightning_osdp.planner.assign.additive import Modes
from lightning_osdp.planner.assign.merging.share import LARGEST_SHARE, in_other_units, kinds_or_parts
from lightning_osdp.planner.assign.setting import Setting
from lightning_osdp.planner.engine import effects_of

_WORTH_JOINING = 1e-3
"""Fraction of the step time for which units are joined: fewer and larger ones leave less to choose."""

_MAX_ROUNDS = 4
"""Times that units are joined in pairs: up to 16 are one then."""

_Pair = tuple[str, str]


def apart_units(setting: Setting) -> list[Setting]:
    """The setting with frozen units that hold nothing trained, see `apart`; none where it has no others.

    Frozen units may be resident then, and what is trained is joined over them.
    """

    def make() -> Iterator[Setting]:
        units = apart(setting.profile, setting.units)
        if len(units) > len(setting.units):
            yield dataclasses.replace(setting, units=units)

    return setting.variants.once(setting, "apart", make)


def pair_units(setting: Setting, names: Collection[str] | None = None) -> list[Setting]:
    """The setting with one unit for each exchange of several operators; none without these.

    The first of those that share an operator counts. Only those whose first operators are in ``names``, where given.
    """

    def make() -> Iterator[Setting]:
        units, taken = setting.units, set[str]()
        places = {unit.operators[0].name: place for place, unit in enumerate(units) if len(unit.operators) == 1}
        num_ranks = setting.cluster.world_size
        together = [each for each in setting.profile.exchanges if len(each.operators) > 1]
        together = [each for each in together if each.divides_over(num_ranks)]
        pairs = [each.operators for each in sorted(together, key=attrgetter("is_shared"))]  # those that are fed first
        chosen: list[list[str]] = []
        for pair in pairs:
            if not places.keys() >= {*pair} or not taken.isdisjoint(pair) or not (names is None or pair[0] in names):
                continue
            members = [places[name] for name in pair]
            follow = all(
                next_to(units, place) == behind and may_join(setting.profile, units, place)
                for place, behind in pairwise(members)
            )
            if follow:
                chosen.append([units[place].name for place in members])
                taken |= {*pair}
        found = joined(setting.profile, units, chosen) if chosen else None
        if found is not None:
            yield dataclasses.replace(setting, units=found)

    return setting.variants.once(setting, ("pairs", *(names or ())), make)


def trained_together(setting: Setting) -> list[Setting]:
    """The setting with frozen units apart, and all trained units one that follow each other; none without frozen ones.

    Where links are slow to begin, a step then has few collectives; as few as that of DDP where all is kept.
    """

    def make() -> Iterator[Setting]:
        units = apart(setting.profile, setting.units, takes_trained=True)
        groups: list[list[int]] = []
        for place in (place for place in range(1, len(units)) if units[place].gradient_bytes):
            last = groups[-1][-1] if groups else 0
            if next_to(units, last) == place and may_join(setting.profile, units, last):
                groups[-1].append(place)
            else:
                groups.append([place])
        most_bytes = LARGEST_SHARE * sum(unit.gathered_bytes for unit in units)
        names = [
            [units[place].name for place in group]
            for group in groups
            if len(group) > 1 and sum(units[place].gathered_bytes for place in group) <= most_bytes
        ]
        are_frozen = any(unit.gathered_bytes and not unit.gradient_bytes for unit in units[1:])
        found = joined(setting.profile, units, names) if names and are_frozen else None
        if found is not None:
            yield dataclasses.replace(setting, units=found)

    return setting.variants.once(setting, "trained together", make)


def join_units(setting: Setting, modes: Modes, *, memory_limit_bytes: float) -> tuple[Setting, Modes]:
    """The setting, whose units are shared, with units of several modules where that is faster, and its modes."""
    if setting.is_paper or setting.decided.num_slices:
        return setting, modes
    time_s = setting.costs.step_time_s(modes)
    for _ in range(_MAX_ROUNDS):
        before = setting
        for pairs in _pairs(setting, modes):
            setting, modes, time_s = _join(setting, modes, time_s, pairs, memory_limit_bytes)
        if setting is before:
            break
    return setting, modes


def _join(
    setting: Setting, modes: Modes, time_s: float, pairs: Sequence[_Pair], memory_limit_bytes: float
) -> tuple[Setting, Modes, float]:
    """Joins as many of the last pairs as fit and are faster, found by halving; returns the step's seconds, too."""
    names = {unit.name for unit in setting.units}
    pairs = [pair for pair in pairs if names.issuperset(pair)]  # others may have been joined meanwhile
    count = len(pairs)
    while count:
        chosen = tuple(pairs[-count:])
        make = partial(joined, setting.profile, setting.units, chosen)
        tried = in_other_units(setting, modes, ("joined", *chosen), make)
        if tried is None:
            break
        tried_s = tried[0].costs.step_time_s(tried[1])
        if tried_s >= time_s * (1 - _WORTH_JOINING):
            break
        if tried[0].costs.fits(tried[1], memory_limit_bytes):
            return *tried, tried_s
        count //= 2
    return setting, modes, time_s


def _pairs(setting: Setting, modes: Modes) -> list[list[_Pair]]:
    """Pairs of neighbours of one mode that may be joined, equal ones together, no unit in two of a kind."""
    most_bytes = LARGEST_SHARE * sum(unit.gathered_bytes for unit in setting.units)
    units, joinable = setting.units, list[int]()
    for index in range(1, len(units) - 1):
        mode, behind = modes[index], next_to(units, index)
        if behind == len(units) or mode != modes[behind] or "saves" in mode or effects_of(mode).exchanges:
            continue
        fits = units[index].gathered_bytes + units[behind].gathered_bytes <= most_bytes
        if fits and may_join(setting.profile, units, index):
            joinable.append(index)
    structures = [(_structure(units[index]), _structure(units[next_to(units, index)])) for index in joinable]
    found: dict[tuple[object, ...], list[_Pair]] = {}
    taken: dict[tuple[object, ...], set[str]] = {}
    for index, kind in zip(joinable, kinds_or_parts(structures, joinable, len(units)), strict=True):
        first, second, key = units[index], units[next_to(units, index)], (modes[index], kind)
        if taken.setdefault(key, set()).isdisjoint({first.name, second.name}):
            taken[key] |= {first.name, second.name}
            found.setdefault(key, []).append((first.name, second.name))
    return [*found.values()]


def _structure(unit: UnitProfile) -> tuple[object, ...]:
    """Key that is equal for units that cost the same."""
    return unit.gathered_bytes, unit.gradient_bytes, unit.kind
