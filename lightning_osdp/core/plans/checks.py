"""Checks of units and blocks that people may have edited in a plan's file, and files of an earlier schema."""

from __future__ import annotations

from typing import Any

from lightning_osdp.core.axes import ANYTHING, AXES, LEVELS, NAMED_MODES, Treatment
from lightning_osdp.core.exchange import KINDS, numbers_of_operators
from lightning_osdp.core.plans.document import shown
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.core.text.names import is_inside, upwards
from lightning_osdp.errors import PlanFormatError


def from_schema_3(document: dict[str, Any]) -> dict[str, Any]:
    """A plan as schema 4 has it: units had names of modes and one ``sync``, blocks had ``activations``.

    Units had prices of two other options in place of a menu; these are left out.
    """
    found = {**document, "schema_version": 4}
    if isinstance(found.get("units"), list):
        found["units"] = [_unit_from_schema_3(unit) if isinstance(unit, dict) else unit for unit in found["units"]]
    for name in ("blocks", "recomputable"):
        if isinstance(found.get(name), list):
            found[name] = [
                {**{k: v for k, v in block.items() if k != "activations"}, "treatment": {"saves": block["activations"]}}
                if isinstance(block, dict) and "activations" in block
                else block
                for block in found[name]
            ]
    return found


def _unit_from_schema_3(unit: dict[str, Any]) -> dict[str, Any]:
    modes, sync = unit.get("modes"), unit.get("sync", "every")
    if not isinstance(modes, list):
        return unit
    prices = {"keep_saves_s", "keep_costs_bytes", "accumulate_saves_s", "accumulate_costs_bytes"}
    left = {name: value for name, value in unit.items() if name not in {"modes", "sync", *prices}}
    treatments = [{**NAMED_MODES[mode], "sync": sync} if mode in [*NAMED_MODES] else mode for mode in modes]
    return {**left, "treatments": treatments}


def check_choice(what: str, value: str, choices: tuple[str, ...], where: str) -> None:
    """Raises `PlanFormatError` if a value is none of the choices."""
    if value not in choices:
        raise PlanFormatError(f"Expected {what} of {where} to be one of {choices}, got {value!r}.")


def _check_treatment(treatment: Treatment, on: str, where: str) -> None:
    if any(AXES[name].on != on for name in treatment):
        raise PlanFormatError(f"Expected the treatment of {where} to be that of a {on}, got {treatment!r}.")
    wrong = next((name for name, value in treatment.items() if treatment.within(ANYTHING)[name] != value), None)
    if wrong is not None:
        raise PlanFormatError(
            f"Expected the treatment of {where} to be one that there is, got {treatment!r}: {wrong!r} of"
            f" {treatment[wrong]!r} does not go with the others. Leave one of them out."
        )


def check_units(units: tuple[Unit, ...], source: str) -> None:
    """Raises `PlanFormatError` if these cannot be the units of a plan; the text calls the plan ``source``."""
    seen_units: set[str] = set()
    seen_operators: set[str] = set()
    seen_modules: set[str] = set()
    for unit in units:
        where = f"unit {unit.name!r} of {source}"
        if not unit.treatments:
            raise PlanFormatError(f"Expected at least one treatment of {where}, got none.")
        for treatment in unit.treatments:
            _check_treatment(treatment, "unit", where)
        if len({treatment.of_all_slices for treatment in unit.treatments}) > 1:
            shared = tuple(name for name, axis in AXES.items() if not axis.by_slice)
            raise PlanFormatError(
                f"Expected all slices of {where} to have the same values of {shared}, got {shown(unit.treatments)}."
            )
        repeated = seen_operators.intersection(unit.operators) | ({unit.name} & seen_units)
        if repeated or len(set(unit.operators)) < len(unit.operators):
            raise PlanFormatError(f"Expected units and operators of {source} once each, got {where} again.")
        if seen_modules.intersection(unit.modules) or len(set(unit.modules)) < len(unit.modules):
            raise PlanFormatError(f"Expected modules of {source} in one unit each, got those of {where} again.")
        if unit.modules and (unit.num_slices > 1 or not unit.name):
            raise PlanFormatError(f"Expected no 'modules' in {where}: neither slices nor the root are grouped.")
        _check_exchange(unit, where)
        seen_modules.update(unit.modules)
        seen_units.add(unit.name)
        seen_operators.update(unit.operators)
    if "" not in seen_units:
        raise PlanFormatError(f"Expected {source} to have a root unit, named '', got none.")


def _check_exchange(unit: Unit, where: str) -> None:
    if not unit.exchange:
        if any("moves" in treatment for treatment in unit.treatments):
            raise PlanFormatError(f"Expected an 'exchange' of {where}, one of {KINDS}, for it moves activations.")
        return
    check_choice("'exchange'", unit.exchange, KINDS, where)
    numbers = numbers_of_operators(unit.exchange)
    if len(unit.operators) not in numbers or unit.operators != unit.wrapped_modules or unit.num_slices > 1:
        raise PlanFormatError(
            f"Expected {where} to be {' or '.join(map(str, numbers))} operators, the modules of the unit, for its"
            f" exchange is {unit.exchange!r}, got {shown(unit.operators)} in {unit.num_slices} slices."
        )


def check_blocks(blocks: tuple[Block, ...], source: str) -> None:
    """Raises `PlanFormatError` if these cannot be blocks of one plan, which the text calls ``source``."""
    names = {block.name for block in blocks}
    if len(names) < len(blocks):
        raise PlanFormatError(f"Expected blocks of {source} once each, got {[block.name for block in blocks]}.")
    for block in blocks:
        where = f"block {block.name!r} of {source}"
        _check_treatment(block.treatment, "block", where)
        if not block.treatment:
            raise PlanFormatError(f"Expected {where} to do something else than to keep what it saves. Leave it out.")
        if bool(block.kept) != (block.activations in LEVELS) or [*block.kept] != sorted({*block.kept}):
            raise PlanFormatError(
                f"Expected {where} to name results in ascending order in 'kept' if it is at one of {LEVELS}, and none"
                f" else, got {block.activations!r} with {[*block.kept]}."
            )
        if not block.name or not names.isdisjoint(upwards(block.name)[1:]):
            raise PlanFormatError(f"Expected no block of {source} inside another, and not the root, got {where}.")


def check_levels(units: tuple[Unit, ...], blocks: tuple[Block, ...], source: str) -> None:
    """Refuses levels of blocks with slices inside: slices are heavy operations of their own, and shift the others."""
    split = [unit.name for unit in units if unit.num_slices > 1]
    for block in blocks:
        inside = [name for name in split if block.kept and is_inside(name, [block.name])]
        if inside:
            raise PlanFormatError(
                f"Expected block {block.name!r} of {source} to recompute everything, or no operator inside to be in"
                f" slices, got {block.activations!r} and slices of {inside[0]!r}."
            )
