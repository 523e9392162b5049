"""The search for modes: additive where nothing overlaps, from there on by simulation where something does."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_osdp.planner.assign.additive import NO_GAIN, Modes
from lightning_osdp.planner.assign.merging.slices import agreed_on
from lightning_osdp.planner.assign.overlap import solve_overlapped
from lightning_osdp.planner.assign.paths import Paths
from lightning_osdp.planner.assign.setting import Setting
from lightning_osdp.planner.assign.solve import Solved, fill, solve
from lightning_osdp.planner.cost import PeakMemory
from lightning_osdp.planner.engine import effects_of

MAX_TRIES = 6
"""Limits that are tried where the closed form is not exact: halvings of what it leaves, or of what it leaves out."""

_OF_ROOT = {"home": "node", "states": "device", "shard": "device"}
"""Values that the root may have in place of those in its one option, where they are offered."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Modes of a setting, one per unit, with what they are predicted to cost."""

    setting: Setting
    modes: Modes
    step_time_s: float
    bound_s: float
    """Seconds of a step that no assignment goes below that fits by the closed form of `StepMemory`."""
    note: str = ""
    is_exact: bool = False
    """True where the peak is that of the events, and not that of the closed form."""

    @cached_property
    def peak(self) -> PeakMemory:
        """Predicted peak of one optimizer step."""
        costs = self.setting.costs
        return costs.exact_peak(self.modes) if self.is_exact else costs.peak(self.modes)

    @property
    def gap(self) -> float:
        """Gap to the bound, as a fraction of it: ``step_time_s / bound_s - 1``."""
        return max(0.0, self.step_time_s / self.bound_s - 1) if self.bound_s > 0 else 0.0


def assign_modes(
    setting: Setting, *, memory_limit_bytes: int, search: str = "depth_first", worth_s: float = math.inf
) -> Assignment | None:
    """The fastest assignment found whose peak fits, with a bound on all of them; None if none fits.

    Args:
        setting: a step, and what may be chosen of it.
        memory_limit_bytes: the most bytes that may live on one rank.
        search: name of a solver in ``search.SOLVERS``.
        worth_s: a step time that is of no use: where none below it is possible, the modes are not improved further.
    """
    first = found = _assigned(setting, memory_limit_bytes, search, worth_s)
    if first is None:
        return None
    if setting.costs.hosted:
        return _as_simulated(first, memory_limit_bytes, search, worth_s)
    leaves_out = any(mode.needs_nodes or effects_of(mode).is_passed_over for mode in first.modes)
    if len(setting.activations) == 1 and not leaves_out:
        return first
    # The closed form may leave out what a block keeps beside its gathered unit, what is larger in nodes, what is
    # gathered ahead in place of units that gather nothing, and activations of all ranks while these run.
    room_bytes = memory_limit_bytes
    for _ in range(MAX_TRIES):
        if found is None:
            break
        peak_bytes = setting.costs.exact_peak_bytes(found.modes)
        if peak_bytes <= memory_limit_bytes:
            return replace(found, is_exact=True, bound_s=min(first.bound_s, found.bound_s))
        room_bytes -= peak_bytes - memory_limit_bytes
        found = _assigned(setting, room_bytes, search, worth_s, before=found)
    least = setting.costs.least_memory_modes
    if setting.costs.exact_peak_bytes(least) > memory_limit_bytes:
        return None
    return replace(first, modes=least, step_time_s=setting.costs.step_time_s(least), is_exact=True)


def _as_simulated(first: Assignment, memory_limit_bytes: int, search: str, worth_s: float) -> Assignment | None:
    """The fastest assignment found that fits as simulated, of those that fill less and less memory by the closed form.

    Where units may be on the host, the closed form leaves out temporaries of updates on the device. ``first`` fits by
    the closed form. Bytes beyond the limit are left out next, or half of those that are open.
    """
    setting, costs = first.setting, first.setting.costs
    excess = costs.exact_peak_bytes(first.modes) - memory_limit_bytes
    if excess <= 0:
        return replace(first, is_exact=True)
    least = costs.least_memory_modes
    if costs.exact_peak_bytes(least) > memory_limit_bytes:
        return None
    best = replace(first, modes=least, step_time_s=costs.step_time_s(least), is_exact=True)
    fits, fails = (costs.memory.peak_bytes(modes) for modes in (least, first.modes))
    for _ in range(MAX_TRIES):
        if fails - fits < 2:
            break
        room_bytes = max((fits + fails) // 2, fails - excess)
        found = _assigned(setting, room_bytes, search, worth_s, before=first)
        if found is None:
            break
        excess = costs.exact_peak_bytes(found.modes) - memory_limit_bytes
        if excess > 0:
            fails = costs.memory.peak_bytes(found.modes)
            continue
        fits, excess = room_bytes, fails
        if found.step_time_s < best.step_time_s:
            best = replace(found, is_exact=True, bound_s=first.bound_s)
    return best


def assignment_of(setting: Setting, modes: Modes, *, bound_s: float | None) -> Assignment:
    """Assignment of these modes, which fit, with what they cost, bytes as simulated.

    No other assignment is faster than ``bound_s``; None: it is as if memory were no concern.
    """
    costs = setting.costs
    time_s = costs.step_time_s(modes)
    if bound_s is None:
        fastest_s = costs.additive.fastest_s - costs.root_more_s
        bound_s = Paths(setting.all_ahead).least_s() if setting.overlaps else fastest_s
    return Assignment(setting=setting, modes=modes, step_time_s=time_s, bound_s=min(time_s, bound_s), is_exact=True)


def _assigned(
    setting: Setting, memory_limit_bytes: int, search: str, worth_s: float, *, before: Assignment | None = None
) -> Assignment | None:
    """Fastest modes found that fit by the closed form; None if none do. ``before`` was found in more memory."""
    costs = setting.costs
    if costs.memory.peak_bytes(costs.least_memory_modes) > memory_limit_bytes:
        return None
    rooms = costs.memory.room_bytes(memory_limit_bytes)
    if setting.overlaps:
        known = None if before is None else Solved(before.modes, before.step_time_s, before.bound_s)
        solved = solve_overlapped(setting, rooms, search=search, worth_s=worth_s, before=known)
    else:
        solved = solve(costs.additive, rooms, search=search)
    modes = agreed_on(setting, solved.modes)
    return Assignment(
        setting=setting,
        modes=modes,
        step_time_s=solved.time_s if modes == solved.modes else costs.step_time_s(modes),
        bound_s=solved.bound_s - (0.0 if setting.overlaps else costs.root_more_s),
        note=solved.note,
    )


def fill_spare(assignment: Assignment, *, memory_limit_bytes: int) -> Assignment:
    """The assignment with its peak as simulated, and faster modes as far as that leaves room for them.

    Where gradients are accumulated the closed form counts units twice that run and are held. Modes that are found here
    are outside the space that the bound is about: they can only be faster. So is the root in the node, or with its
    states on the device, as other units.
    """
    setting, costs = assignment.setting, assignment.setting.costs
    if setting.is_paper and not any(effects_of(mode).waits for options in costs.options for mode in options):
        return assignment
    rooms, modes, step_time_s = costs.memory.room_bytes(memory_limit_bytes), assignment.modes, assignment.step_time_s
    fits, fails = 0.0, sum(sorted(costs.memory.gathered_bytes)[-2:])
    spare_bytes = fails
    for _ in range(MAX_TRIES):
        found = fill(costs.additive, assignment.modes, [room + spare_bytes for room in rooms])
        found = agreed_on(setting, found)
        if costs.exact_peak_bytes(found) <= memory_limit_bytes:
            fits = spare_bytes
            if costs.step_time_s(found) < step_time_s:
                modes, step_time_s = found, costs.step_time_s(found)
        else:
            fails = spare_bytes
        if fits == fails:
            break
        spare_bytes = (fits + fails) / 2
    offered = {axis: {mode[axis] for options in costs.options for mode in options} for axis in _OF_ROOT}
    for axis, value in _OF_ROOT.items():
        if value not in offered[axis] or all(mode[axis] != value for mode in setting.modes):
            continue
        found = tuple(
            mode.but(**{axis: value}) if unit.is_root else mode for unit, mode in zip(setting.units, modes, strict=True)
        )
        found_s = costs.step_time_s(found)
        if found_s < step_time_s and costs.fits(found, memory_limit_bytes):
            modes, step_time_s = found, found_s
    found = _resident_as_well(setting, modes, step_time_s, memory_limit_bytes)
    if found != modes:
        modes, step_time_s = found, costs.step_time_s(found)
    return replace(assignment, modes=modes, step_time_s=step_time_s, is_exact=True)


def _resident_as_well(setting: Setting, modes: Modes, time_s: float, memory_limit_bytes: int) -> Modes:
    """Modes with more frozen units resident, as many as fit and make the step no slower, the largest first.

    Computing may hide what they gather, but others may need the links, and no clock is exact.
    """
    costs = setting.costs
    resident = {
        unit: mode
        for unit, options in enumerate(costs.options)
        for mode in options
        if not setting.units[unit].gradient_bytes
        and effects_of(mode).is_resident
        and mode["saves"] == modes[unit]["saves"]
        and mode != modes[unit]
    }
    left = sorted(resident, key=lambda unit: -setting.units[unit].gathered_bytes)
    count = len(left)
    while count:
        chosen = {*left[:count]}
        tried = tuple(resident[unit] if unit in chosen else mode for unit, mode in enumerate(modes))
        fits = costs.exact_peak_bytes(tried) <= memory_limit_bytes
        if fits and costs.step_time_s(tried) <= time_s * (1 + NO_GAIN):
            modes, left = tried, left[count:]
            count = len(left)
        else:
            count //= 2
    return modes
