"""Plans that a sharded module can change to, with less memory, where training takes more than was predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lightning_osdp.core.axes import AXES
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.core.plans.plan import Plan, workload_of
from lightning_osdp.core.step import Workload
from lightning_osdp.core.text.names import is_inside


@dataclass(frozen=True)
class _Move:
    """A unit that keeps less, or a block that recomputes."""

    changed: Unit | Block
    freed_bytes: float
    lost_s: float

    @property
    def price(self) -> float:
        """Seconds lost for each byte that is freed."""
        return self.lost_s / self.freed_bytes if self.freed_bytes > 0 else float("inf")


def freeable_bytes(plan: Plan) -> int:
    """Bytes that are kept for the sake of time: gathered parameters, gradients between micro-batches, activations."""
    return round(sum(move.freed_bytes for move in _moves(plan)))


def with_less_memory(plan: Plan, wanted_bytes: int) -> Plan | None:
    """The plan with units sharded, their gradients reduced earlier, or blocks recomputing, until so much is freed.

    The change that frees most bytes for a second goes first; at least one is made, and `check_change` allows all. Step
    time and peak are predicted from menus of units and blocks, so nothing need be profiled again. None where nothing is
    left to give up.
    """
    lower, freed_bytes, lost_s = plan, 0.0, 0.0
    while freed_bytes < wanted_bytes or freed_bytes == 0:
        best = min(_moves(lower), key=lambda move: move.price, default=None)
        if best is None:
            break
        lower = _moved(lower, best.changed)
        freed_bytes += best.freed_bytes
        lost_s += best.lost_s
    return None if lower is plan else _predicted(plan, lower, freed_bytes, lost_s)


def recomputing(plan: Plan, names: Iterable[str]) -> Plan:
    """The plan with these of its blocks recomputing everything, whatever results they kept."""
    more = {block.name: block for block in plan.recomputable}
    for block in Block.recomputing(names):
        plan = _moved(plan, more.get(block.name, block))
    return plan


def in_micro_batches(plan: Plan, workload: Workload) -> Plan:
    """The plan in these micro-batches; where they are others than its own, nothing is predicted of it."""
    if workload == workload_of(plan):
        return plan
    return replace(
        _without_peak(plan),
        micro_batch_size=workload.micro_batch_size,
        num_micro_batches=workload.num_micro_batches,
        peak_bytes=0,
        host_bytes=0,
        step_time_s=0.0,
        corrected_step_time_s=0.0,
        samples_per_s=0.0,
        gap=0.0,
        solver="",
        all_zdp_step_time_s=0.0,
    )


def _moves(plan: Plan) -> Iterator[_Move]:
    """Changes of a value of an axis to the one that takes least memory, as units' menus price them.

    One rank keeps all units, and the root is kept.
    """
    for unit in plan.units if plan.world_size > 1 else ():
        for axis in AXES.values() if unit.name else ():
            changed = unit.with_least(axis.name)
            if axis.on == "unit" and axis.can_change and changed.treatments != unit.treatments:
                lost_s, more_bytes = changed.cost().beyond(unit.cost())
                yield _Move(replace(changed, time_s=max(0.0, unit.time_s + lost_s)), -more_bytes, lost_s)
    yield from (_Move(block, block.frees_bytes, block.costs_s) for block in plan.recomputable)


def _moved(plan: Plan, changed: Unit | Block) -> Plan:
    if isinstance(changed, Unit):
        units = tuple(changed if unit.name == changed.name else unit for unit in plan.units)
        return replace(plan, units=units)
    left = tuple(block for block in plan.recomputable if block.name != changed.name)
    others = [block for block in plan.blocks if block.name != changed.name]
    for before in plan.blocks:
        if before.name == changed.name:  # it has kept some results
            freed_bytes, costs_s = before.frees_bytes + changed.frees_bytes, before.costs_s + changed.costs_s
            changed = replace(changed, frees_bytes=freed_bytes, costs_s=costs_s)
    operators = [operator for unit in plan.units if unit.name for operator in unit.operators]

    def place(block: Block) -> int:
        """Place of the block's first operator."""
        own = (i for i, name in enumerate(operators) if is_inside(name, [block.name]))
        return next(own, len(operators))

    return replace(plan, blocks=tuple(sorted([*others, changed], key=place)), recomputable=left)


def _predicted(plan: Plan, lower: Plan, freed_bytes: float, lost_s: float) -> Plan:
    changed = _without_peak(lower)
    if plan.peak_bytes > 0:
        # with blocks that recompute, or slices, a plan may take less than plain FSDP
        is_least = not plan.all_zdp_how and plan.all_zdp_peak_bytes <= plan.peak_bytes and lower.blocks == plan.blocks
        least_bytes = plan.all_zdp_peak_bytes if is_least else 0
        changed = replace(changed, peak_bytes=max(least_bytes, round(plan.peak_bytes - freed_bytes)))
    if plan.step_time_s > 0:
        step_time_s = max(plan.step_time_s, plan.step_time_s + lost_s)
        slower = step_time_s / plan.step_time_s
        changed = replace(
            changed,
            step_time_s=step_time_s,
            corrected_step_time_s=0.0,
            samples_per_s=plan.samples_per_s / slower,
            gap=(1 + plan.gap) * slower - 1,
        )
    return changed


def _without_peak(plan: Plan) -> Plan:
    """Plan without the details of a peak that is no longer where it was."""
    return replace(plan, peak_phase="", peak_operator="", peak_parts={}, loss_bytes=0, evaluation_peak_bytes=0)
