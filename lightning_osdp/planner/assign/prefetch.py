"""Choice of the units that are gathered ahead, where memory does not suffice to gather all of them ahead.

To gather ahead takes a second buffer. Where that does not fit beside one large unit, all others may still be gathered
ahead: a plan without that prefetch alone is nearly as fast as one with all of them. So modes are chosen in two ways:

- As if to gather ahead took no memory. No modes with any units gathered ahead are faster than the bound on these,
  for whatever fits with some of them gathered ahead fits with none, and to gather later is never faster. Where not all
  units can be gathered ahead, what is there ahead at moments that exceed the limit is gathered late instead.
- With everything gathered ahead, where that fits. To keep something in place of a prefetch gains
  less than the prefetch saves: more in none of 32 problems that were tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_osdp.planner.assign.additive import Modes
from lightning_osdp.planner.assign.assign import Assignment, assign_modes
from lightning_osdp.planner.assign.bounds import bound_ahead_s
from lightning_osdp.planner.assign.setting import Setting
from lightning_osdp.planner.cost.peak_memory import ROUNDING_BYTES
from lightning_osdp.planner.engine import GATHERS, Event, Moment, in_modes

_MAX_ROUNDS = 4
"""Times that units are found that must not be gathered ahead; mostly the first one finds all of them."""


def assign_ahead(
    setting: Setting, *, memory_limit_bytes: int, search: str, worth_s: float, floor_s: float = math.inf
) -> Assignment | None:
    """The fastest assignment found, with units gathered ahead as far as that fits, and a bound on all of these.

    The setting has every unit gathered ahead that may be, that of the assignment what fits; ``floor_s`` bounds other
    settings, and a bound that is no less need not be improved. Other arguments are those of `assign_modes`. None if
    none fits.
    """
    given: Any = {"memory_limit_bytes": memory_limit_bytes, "search": search}
    relaxed, costs = setting.ahead_for_free, setting.costs
    if relaxed is not setting and costs.memory.peak_bytes(costs.least_memory_modes) <= memory_limit_bytes:
        found = assign_modes(setting, worth_s=worth_s, **given)
        if found is not None:
            enough_s = min(found.bound_s, worth_s, floor_s)
            least_s = bound_ahead_s(setting, found.modes, enough_s=enough_s, **given)
            return replace(found, bound_s=min(found.bound_s, least_s))
    best = assign_modes(relaxed, worth_s=worth_s, **given)
    if best is None or relaxed is setting:
        return best
    chosen = as_far_as_fits(setting, best.modes, memory_limit_bytes=memory_limit_bytes)
    if chosen is None:
        return None
    return replace(best, setting=chosen, step_time_s=chosen.costs.step_time_s(best.modes), is_exact=True)


def as_far_as_fits(setting: Setting, modes: Modes, *, memory_limit_bytes: int) -> Setting | None:
    """The setting, in which every unit is gathered ahead that may be, with as many as fit with these modes.

    None where not even none do.
    """
    engine, least = setting.engine, setting.least_ahead or setting.engine
    may = (engine.forward_prefetch != least.forward_prefetch, engine.backward_prefetch != least.backward_prefetch)
    late: list[list[str]] = [[], []]
    for _ in range(_MAX_ROUNDS):
        setting = replace(setting, engine=engine.gathering_late(late[False], late[True]))
        above = list(dict.fromkeys(_ahead_above(setting, modes, memory_limit_bytes)))
        if not above:
            return setting
        more = [(way, setting.units[u].name) for way, u in above if u is not None and may[way]]
        more = [(way, name) for way, name in more if name not in late[way]]
        if not more:
            return None
        for way, name in more:
            late[way].append(name)
    every = [unit.name for unit in setting.units if not unit.is_root]
    setting = replace(setting, engine=engine.gathering_late(*(every if each else [] for each in may)))
    return setting if setting.costs.exact_peak_bytes(modes) <= memory_limit_bytes else None


def _ahead_above(setting: Setting, modes: Modes, memory_limit_bytes: int) -> list[tuple[bool, int | None]]:
    """Pairs at moments above the limit: True in backward, and a unit that is there ahead; None where none is."""
    ahead: set[int] = set()
    above: list[tuple[bool, int | None]] = []

    def note(num_bytes: float, _: Callable[[], Moment]) -> None:
        if num_bytes > memory_limit_bytes + ROUNDING_BYTES:
            above.extend((live.is_in_backward, unit) for unit in sorted(ahead))
            if not ahead:
                above.append((live.is_in_backward, None))

    step = in_modes(setting, modes)
    live = setting.engine.live_parts(step, note, modes=modes)
    live.begin_step()
    for events in setting.engine.events_of(step, modes):
        live.begin_micro_batch()
        for event, following in zip(events, [*events[1:], None], strict=True):
            if event.kind in GATHERS and following != Event("await", event.of):
                ahead.add(event.of)
            elif event.kind == "await":
                ahead.discard(event.of)
            live.read(event)
    live.update()
    return above
