"""Rules of the changes that a plan may have while its module is trained, between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from lightning_osdp.core.axes import AXES, Treatment
from lightning_osdp.core.plans.document import shown
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import PlanMismatchError
from lightning_osdp.planner.engine.effects import effects_of
from lightning_osdp.planner.engine.fsdp2 import FSDP2

_DIVISION = ("micro_batch_size", "num_micro_batches")
_SETTINGS = tuple(field.name for field in fields(FSDP2))
FLIPS = frozenset({*(axis.name for axis in AXES.values() if axis.can_change), *_SETTINGS})
"""Axes, and settings of a plan, that may change."""
_OF_PLAN = ("world_size", "node_size", *_DIVISION, *_SETTINGS)
"""Fields that say what is run; all others predict or tell."""
_OF_UNIT = ("operators", "modules", "num_slices")


def check_change(current: Plan, plan: Plan, *, may_divide: bool = False) -> None:
    """Returns if a module that is sharded by one plan can go on under another.

    Raises:
        PlanMismatchError: they differ in something that is not in `FLIPS`; the text has the first difference.
    """
    allowed = FLIPS.union(_DIVISION if may_divide else ())
    differences = [
        (what, used, planned)
        for field, what, used, planned in _compared(current, plan)
        if field not in allowed and used != planned
    ]
    if not differences:
        return
    what, used, planned = differences[0]
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    raise PlanMismatchError(
        f"Expected a plan that differs from the one in use only in what may change between two steps"
        f" ({', '.join(sorted(FLIPS))}), but {what} is {shown(used)} in use and {shown(planned)}"
        f" in the plan{more}. To train under that plan, make a new module and a new Trainer with"
        " OSDPStrategy(plan=...), and load a checkpoint."
    )


def _compared(current: Plan, plan: Plan) -> Iterator[tuple[str, str, Any, Any]]:
    """Field, what has it, and both values."""
    for name in dict.fromkeys([*current.fingerprint, *plan.fingerprint]):
        yield "fingerprint", f"parameter {name!r}", current.fingerprint.get(name), plan.fingerprint.get(name)
    for field in _OF_PLAN:
        yield field, field, getattr(current, field), getattr(plan, field)
    used_names, planned_names = ([unit.name for unit in each.units] for each in (current, plan))
    yield "units", "the list of units", used_names, planned_names
    if used_names == planned_names:
        for used, planned in zip(current.units, plan.units, strict=True):
            # where weights move, the exchange only tells what else could
            moves = any(effects_of(own).exchanges for each in (used, planned) for own in each.treatments)
            for field in (*_OF_UNIT, *(["exchange"] if moves else [])):
                yield field, f"{field!r} of unit {used.name!r}", getattr(used, field), getattr(planned, field)
            for axis in AXES:
                old, new = (tuple(dict.fromkeys(own[axis] for own in each.treatments)) for each in (used, planned))
                yield axis, f"{axis!r} of unit {used.name!r}", old, new
    used_of, planned_of = ({block.name: block.treatment for block in each.blocks} for each in (current, plan))
    for name in dict.fromkeys([*used_of, *planned_of]):
        for axis in AXES:
            before, after = (each.get(name, Treatment())[axis] for each in (used_of, planned_of))
            yield axis, f"{axis!r} of block {name!r}", before, after
