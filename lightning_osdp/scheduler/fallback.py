"""Plans with the same units and less memory, where training takes more than a plan was predicted to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.core.plan import Plan, Unit


@dataclass(frozen=True)
class _Move:
    """A unit with less memory."""

    unit: Unit
    freed_bytes: float
    lost_s: float

    @property
    def price(self) -> float:
        """Seconds for a byte."""
        return self.lost_s / self.freed_bytes if self.freed_bytes > 0 else float("inf")


def freeable_bytes(plan: Plan) -> int:
    """Bytes that are kept for the sake of time: gathered parameters, and gradients between micro-batches."""
    return round(sum(move.freed_bytes for move in _moves(plan, plan.units)))


def with_less_memory(plan: Plan, wanted_bytes: int) -> Plan | None:
    """The plan with units sharded, or their gradients reduced earlier, until so many bytes are freed.

    What frees most bytes for a second goes first; at least one unit changes. Step time and peak are predicted from what
    the plan says of its units, so it need not be profiled again.

    Args:
        plan: what does not fit.
        wanted_bytes: that shall be freed, if possible.

    Returns:
        None where nothing is kept.
    """
    units = {unit.name: unit for unit in plan.units}
    freed_bytes = lost_s = 0.0
    while freed_bytes < wanted_bytes or freed_bytes == 0:
        moves = [*_moves(plan, units.values())]
        if not moves:
            break
        best = min(moves, key=lambda move: move.price)
        units[best.unit.name] = best.unit
        freed_bytes += best.freed_bytes
        lost_s += best.lost_s
    changed = tuple(units.values())
    return None if changed == plan.units else _predicted(plan, changed, freed_bytes, lost_s)


def with_smaller_micro_batch(plan: Plan, micro_batch_size: int) -> Plan:
    """The plan with the same samples in an optimizer step, in smaller micro-batches; nothing is predicted of it.

    Args:
        plan: what does not fit.
        micro_batch_size: a divisor of the samples of an optimizer step.
    """
    number = plan.micro_batch_size * plan.num_micro_batches // micro_batch_size
    return dataclasses.replace(
        _without_peak(plan),
        micro_batch_size=micro_batch_size,
        num_micro_batches=number,
        peak_bytes=0,
        step_time_s=0.0,
        samples_per_s=0.0,
        gap=0.0,
        all_zdp_step_time_s=0.0,
    )


def _moves(plan: Plan, units: Iterable[Unit]) -> Iterator[_Move]:
    """What can be given up of these units; one rank keeps all, and the root does."""
    if plan.world_size > 1:
        for unit in units:
            if unit.name:
                yield from _moves_of(unit)


def _moves_of(unit: Unit) -> Iterator[_Move]:
    if unit.sync == "last":
        reduced = dataclasses.replace(unit, sync="every", time_s=max(0.0, unit.time_s + unit.accumulate_saves_s))
        # parameters that are held between micro-batches are there within them all the same
        held_bytes = unit.modes.count(DP.name) / unit.num_slices * unit.keep_costs_bytes
        yield _Move(reduced, max(0.0, unit.accumulate_costs_bytes - held_bytes), unit.accumulate_saves_s)
    if DP.name in unit.modes:
        part = unit.modes.count(DP.name) / unit.num_slices
        lost_s = part * unit.keep_saves_s
        sharded = dataclasses.replace(unit, modes=(ZDP.name,) * unit.num_slices, time_s=max(0.0, unit.time_s + lost_s))
        yield _Move(sharded, part * unit.keep_costs_bytes, lost_s)


def _predicted(plan: Plan, units: tuple[Unit, ...], freed_bytes: float, lost_s: float) -> Plan:
    changed = dataclasses.replace(_without_peak(plan), units=units)
    if plan.peak_bytes > 0:
        # with blocks that recompute, or slices, a plan may take less than plain FSDP
        least_bytes = plan.all_zdp_peak_bytes if plan.all_zdp_peak_bytes <= plan.peak_bytes else 0
        changed = dataclasses.replace(changed, peak_bytes=max(least_bytes, round(plan.peak_bytes - freed_bytes)))
    if plan.step_time_s > 0:
        step_time_s = max(plan.step_time_s, plan.step_time_s + lost_s)
        slower = step_time_s / plan.step_time_s
        changed = dataclasses.replace(
            changed,
            step_time_s=step_time_s,
            samples_per_s=plan.samples_per_s / slower,
            gap=(1 + plan.gap) * slower - 1,
        )
    return changed


def _without_peak(plan: Plan) -> Plan:
    """Without the details of a peak that is no longer where it was."""
    return dataclasses.replace(plan, peak_phase="", peak_operator="", peak_parts={}, evaluation_peak_bytes=0)
