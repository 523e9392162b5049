"""Differences between two plans: decisions, memory, time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.names import is_inside
from lightning_osdp.report.sentences import name_saves, name_treatment

NOT_THERE = "not there"
NUMBERS = (
    "step_time_s",
    "samples_per_s",
    "peak_bytes",
    "evaluation_peak_bytes",
    "memory_limit_bytes",
    "world_size",
    "micro_batch_size",
    "num_micro_batches",
)
_SETTINGS = (
    "backward_prefetch",
    "forward_prefetch",
    "late_forward",
    "late_backward",
    "asynchronous_unshard",
    "node_size",
    "solver",
    "cost_model",
)


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Operators that both plans treat alike in themselves, but differently from each other."""

    operators: tuple[str, ...]
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences from one plan to another."""

    is_same_model: bool
    """True where both are for the same parameters."""
    decisions: tuple[Decided, ...]
    """Operators that are treated differently, in forward order."""
    settings: Mapping[str, tuple[Any, Any]]
    """Settings of prefetching, and of the search, that differ."""
    numbers: Mapping[str, tuple[float, float]]
    """Values of `NUMBERS` in both plans."""


def compare_plans(before: Plan, after: Plan) -> Difference:
    """Compares two plans.

    Operators are compared by mode, by when their gradients are reduced, by what their blocks do with what they save,
    and by what is gathered together with them.
    """
    told = [_treatments(plan) for plan in (before, after)]
    changes: dict[tuple[str, str], list[str]] = {}
    for operator in dict.fromkeys([*told[0], *told[1]]):
        first, second = (each.get(operator, (NOT_THERE, ())) for each in told)
        if first == second:
            continue
        regrouped = first[1] != second[1] and first[1] and second[1]
        pair = (_with_unit(*first), _with_unit(*second)) if regrouped else (first[0], second[0])
        changes.setdefault(pair, []).append(operator)
    both = {name: (getattr(before, name), getattr(after, name)) for name in (*_SETTINGS, *NUMBERS)}
    return Difference(
        is_same_model=before.fingerprint == after.fingerprint,
        decisions=tuple(Decided(operators=tuple(each), before=a, after=b) for (a, b), each in changes.items()),
        settings={name: both[name] for name in _SETTINGS if both[name][0] != both[name][1]},
        numbers={name: both[name] for name in NUMBERS},
    )


def _treatments(plan: Plan) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Operator -> how it is treated, and the operators of its unit."""
    found = {}
    for unit in plan.units:
        treatment = name_treatment(unit).replace("\n", ", ") if unit.name else "root"
        for operator in unit.operators:
            blocks = [name_saves(block) for block in plan.blocks if is_inside(operator, [block.name])]
            found[operator] = (", ".join([treatment, *blocks]), unit.operators)
    return found


def _with_unit(treatment: str, operators: tuple[str, ...]) -> str:
    return f"{treatment}, " + ("alone" if len(operators) == 1 else f"in a unit of {len(operators)}")
