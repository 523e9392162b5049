"""Room that the closed form does not see, where gradients are accumulated: it counts units twice that run and are held.

What it leaves free is filled as far as the simulated step allows. Plans that are found so are outside the space that
the bound is about: they can only be faster.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_osdp.assign.additive import Modes
from lightning_osdp.assign.repair import fill
from lightning_osdp.assign.setting import Setting

MAX_TRIES = 6
"""Halvings of the bytes that may be left: the last try is about one sixtieth of them."""


def fill_spare(setting: Setting, modes: Modes, rooms: Sequence[float], *, limit_bytes: int) -> Modes:
    """Faster modes whose simulated step fits, or the same ones.

    Args:
        setting: model, units, cluster and workload.
        modes: one per unit, which fit.
        rooms: of `StepMemory.room_bytes`.
        limit_bytes: the most bytes that may live on one rank.
    """
    if all(mode.sync == "every" for options in setting.options for mode in options):
        return modes
    best, best_s = modes, setting.step_time_s(modes)
    fits, fails = 0.0, sum(sorted(setting.memory.gathered_bytes)[-2:])
    spare_bytes = fails
    for _ in range(MAX_TRIES):
        found = fill(setting.additive, modes, [room + spare_bytes for room in rooms])
        if setting.exact_peak(found).peak_bytes <= limit_bytes:
            fits = spare_bytes
            if setting.step_time_s(found) < best_s:
                best, best_s = found, setting.step_time_s(found)
        else:
            fails = spare_bytes
        spare_bytes = (fits + fails) / 2
        if fits == fails:
            break
    return best
