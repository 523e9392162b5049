"""Adjacent units of one mode made one unit, where the module tree allows it, it saves time, and it still fits.

A unit costs latency and overhead of its own in every micro-batch; one that wraps a whole block costs them once. It
also gathers and reduces the whole block at once, so every step of the way is checked against the exact peak. A stack
is never merged: a module with two equal modules inside that hold several operators each. Its units are what
communication and computation overlap by, where they do. Units that move activations stay as they are.

This is outside the space that the certified gap is about: it can only make a plan faster than that bound.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from lightning_osdp.core.axes import DP, PLACES, Treatment, on_device
from lightning_osdp.core.text.names import upwards
from lightning_osdp.core.units import UnitProfile, merged
from lightning_osdp.planner.assign.additive import NO_GAIN, Modes
from lightning_osdp.planner.assign.menu import subject_of
from lightning_osdp.planner.assign.setting import Setting
from lightning_osdp.planner.engine import effects_of

LARGEST_SHARE = 0.5
"""Fraction of the model's parameters that one shared unit may hold at most: two units are the least that a plan has."""

MAX_TRIED_UNITS = 8192
"""Units of all settings that are tried, at most, where blocks of each kind are tried apart: every try goes through the
whole model. Where there are more kinds than that allows, blocks of one mode in one part of the model are tried
together; else models in which all blocks differ would take the square of their length."""


def share_units(setting: Setting, modes: Modes, *, memory_limit_bytes: float) -> tuple[Setting, Modes]:
    """The setting, whose units are operators, with blocks for units where that is faster, and its modes.

    Blocks are tried from the innermost outwards, equal ones together: all of them, or as many of the last ones in
    forward order as fit.
    """
    stacks = _stacks(setting)
    modules = _modules(setting)
    most_bytes = LARGEST_SHARE * sum(unit.gathered_bytes for unit in setting.units)
    for depth in sorted({name.count(".") for name in modules}, reverse=True):
        inside = _inside(setting.units)
        blocks: list[_Block] = []
        for name in modules:
            if name.count(".") == depth and name not in stacks:
                units = inside.get(name, [])
                gathered = [unit for unit in units if not effects_of(modes[unit]).exchanges]
                mode = _shared_mode(setting, modes, gathered, most_bytes)
                if mode is not None:
                    blocks.append(_Block(name, mode, _structure(setting, units), units[0]))
        for mode, names in _together(blocks, len(setting.units)):
            setting, modes = _share(setting, modes, names, mode, memory_limit_bytes)
    return setting, modes


class _Block(NamedTuple):
    """A module that may become one unit."""

    name: str
    mode: Treatment
    """Mode of all its units."""
    structure: Hashable
    place: int
    """Place of its first unit among all units."""


def _together(blocks: Sequence[_Block], num_units: int) -> Iterator[tuple[Treatment, list[str]]]:
    """Blocks of one mode that are tried together."""
    kinds = kinds_or_parts([block.structure for block in blocks], [block.place for block in blocks], num_units)
    groups: dict[tuple[Treatment, Hashable], list[str]] = {}
    for block, kind in zip(blocks, kinds, strict=True):
        groups.setdefault((block.mode, kind), []).append(block.name)
    return ((mode, names) for (mode, _), names in groups.items())


def kinds_or_parts(kinds: Sequence[Hashable], places: Sequence[int], num_units: int) -> Sequence[Hashable]:
    """Kinds of what is at these places among so many units; where there are too many, parts of the model instead."""
    most = max(1, MAX_TRIED_UNITS // num_units)
    return kinds if len(set(kinds)) <= most else [place * most // num_units for place in places]


def _shared_mode(setting: Setting, modes: Modes, units: Sequence[int], most_bytes: float) -> Treatment | None:
    """Mode of a block with these units; None where they differ in mode, are one already, hold too much or recompute."""
    chosen = {modes[index] for index in units}
    if len(units) < 2 or len(chosen) > 1 or sum(setting.units[i].gathered_bytes for i in units) > most_bytes:
        return None
    mode = chosen.pop()
    return None if "saves" in mode else mode  # a block that recomputes is a unit by itself


def _share(
    setting: Setting, modes: Modes, names: Sequence[str], mode: Treatment, memory_limit_bytes: float
) -> tuple[Setting, Modes]:
    """Makes units of as many of the last blocks as fit, found by halving."""
    before_s = setting.costs.step_time_s(modes)
    moving = [unit.name for unit, each in zip(setting.units, modes, strict=True) if effects_of(each).exchanges]
    best, fits, fails = (setting, modes), 0, len(names) + 1
    count = len(names)
    while fails - fits > 1:
        last = tuple(names[-count:])
        make = partial(merged, setting.profile, setting.units, last, but=moving)
        tried = in_other_units(setting, modes, ("shared", *last, "", *moving), make, dict.fromkeys(last, mode))
        if tried is not None and tried[0].costs.step_time_s(tried[1]) >= before_s * (1 - NO_GAIN):
            break
        if tried is not None and tried[0].costs.fits(tried[1], memory_limit_bytes):
            best, fits = tried, count
        else:
            fails = count
        count = (fits + fails) // 2
    return best


def in_other_units(
    setting: Setting,
    modes: Modes,
    what: Hashable,
    make: Callable[[], tuple[UnitProfile, ...] | None],
    changed: Mapping[str, Treatment] = MappingProxyType({}),
) -> tuple[Setting, Modes] | None:
    """The setting in other units, which are made once, and their modes; None where there are no such units.

    Units that have no namesake in the setting take their modes from ``changed``, as far as they may: what is frozen may
    be resident, and no longer so in one unit with what is trained.
    """

    def settings() -> Iterator[Setting]:
        units = make()
        if units is not None:
            yield dataclasses.replace(setting, units=units)

    found = setting.variants.once(setting, what, settings)
    if not found:
        return None
    by_name = {unit.name: mode for unit, mode in zip(setting.units, modes, strict=True)} | dict(changed)
    (other,) = found
    found_modes = []
    for unit, options in zip(other.units, other.costs.options, strict=True):
        subject = subject_of(unit, other, other.engine)
        if unit.is_root:
            found_modes.append(DP.but(**by_name[""].only(*PLACES)).within(subject))
            continue
        mode = by_name[unit.name].within(subject)
        # what is frozen may come to be in one unit with what is trained, whose place may be the host alone
        places = (each for each in (mode, *options) if on_device(each) == on_device(mode))
        found_modes.append(next((each for each in places if each in options), mode))
    return other, tuple(found_modes)


def _modules(setting: Setting) -> dict[str, None]:
    """Modules but the root that enclose some operator, in forward order."""
    return dict.fromkeys(name for operator in setting.profile for name in operator.enclosing if name)


def _inside(units: Collection[UnitProfile]) -> dict[str, list[int]]:
    """Places of the units at a module or below, in order, by name of the module; only modules that have any."""
    inside: dict[str, list[int]] = {}
    for index, unit in enumerate(units):
        for name in upwards(unit.name):
            inside.setdefault(name, []).append(index)
    return inside


def _structure(setting: Setting, inside: Sequence[int]) -> tuple[object, ...]:
    """Key that is equal for modules that hold equal units."""
    return tuple((setting.units[index].gathered_bytes, setting.units[index].kind) for index in inside)


def _stacks(setting: Setting) -> set[str]:
    """Modules with two equal modules inside, neither of them inside the other, that hold several operators."""
    structures: dict[tuple[object, ...], list[str]] = {}
    inside = _inside(setting.units)
    for name in _modules(setting):
        here = inside.get(name, [])
        if sum(len(setting.units[index].operators) for index in here) > 1:
            structures.setdefault(_structure(setting, inside[name]), []).append(name)
    found = set()
    for names in structures.values():
        equal = set(names)
        apart = [name for name in names if equal.isdisjoint(upwards(name)[1:])]
        held = Counter(module for name in apart for module in upwards(name)[1:])
        found |= {module for module, count in held.items() if count > 1}
    return found
