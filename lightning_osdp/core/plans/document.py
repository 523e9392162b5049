"""Dataclasses from JSON that people may have edited: every entry is checked, every error says where it is."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.errors import PlanFormatError

T = TypeVar("T")


def _is_number(value: object) -> bool:
    """Whether it is a finite number; JSON as Python reads it may hold NaN, Infinity and ints that no float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_whole(value: object) -> bool:
    """Whether it is a whole number that torch and Lightning can count to."""
    return type(value) is int and abs(value) < 2**63


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "str": ("a text", lambda value: isinstance(value, str)),
    "int": ("a whole number below 2^63", _is_whole),
    "int | None": ("null or a whole number below 2^63", lambda value: value is None or _is_whole(value)),
    "float": ("a finite number", _is_number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "tuple[str, ...]": ("a list of texts", _are_texts),
    "tuple[int, ...]": (
        "a list of whole numbers below 2^63",
        lambda value: isinstance(value, list) and all(map(_is_whole, value)),
    ),
    "Mapping[str, str]": (
        "an object of texts",
        lambda value: isinstance(value, dict) and _are_texts([*value.values()]),
    ),
    "Mapping[str, int]": (
        "an object of whole numbers below 2^63",
        lambda value: isinstance(value, dict) and all(map(_is_whole, value.values())),
    ),
    "Treatment": ("a treatment", lambda value: isinstance(value, Treatment)),
    "tuple[Treatment, ...]": ("a list of treatments", lambda value: isinstance(value, tuple)),
    "tuple[Option, ...]": ("a list of options", lambda value: isinstance(value, tuple)),
    "tuple[Unit, ...]": ("a list of units", lambda value: isinstance(value, tuple)),
    "tuple[Block, ...]": ("a list of blocks", lambda value: isinstance(value, tuple)),
    "SearchSpace": ("a search space", lambda value: isinstance(value, SearchSpace)),
}
"""Annotation of a field -> what to call it, and whether a JSON value is one."""


def shown(value: object) -> str:
    """The value for an error, cut where it would bury the sentence."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def write_whole(text: str, path: str | Path) -> None:
    """Writes a file, which appears only when it is complete; folders that are missing are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # where a disk was full, or somebody interrupted


def fields_of(kind: Any, entries: Mapping[str, object], where: str, what: str) -> dict[str, dataclasses.Field[Any]]:
    """Fields of a dataclass by name, after checking that the entries of ``where`` are such fields.

    Raises:
        PlanFormatError: an entry is missing whose field has no default, or is unknown.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}
    without_default = (dataclasses.MISSING, dataclasses.MISSING)
    required = {name for name, f in fields.items() if (f.default, f.default_factory) == without_default}
    missing, unknown = required - entries.keys(), entries.keys() - fields.keys()
    if missing or unknown:
        raise PlanFormatError(
            f"Expected {where} to have the entries of {what}; missing: {sorted(missing)}, unknown: {sorted(unknown)}."
        )
    return fields


def read_dataclass(kind: type[T], entries: object, where: str) -> T:
    """Builds a dataclass from a JSON object, called ``where`` in errors, after checking names and types of its entries.

    Its module must postpone the evaluation of annotations. Nested dataclasses come as tuples, already built.

    Raises:
        PlanFormatError: not an object, an entry is missing or unknown, or has another type than its field.
    """
    if not isinstance(entries, dict):
        raise PlanFormatError(f"Expected {where} to be a JSON object, got {shown(entries)}.")
    fields = fields_of(kind, entries, where, "a plan")
    for name, value in entries.items():
        expected, is_kind = _KINDS[cast("str", fields[name].type)]
        if not is_kind(value):
            raise PlanFormatError(f"Expected {name!r} of {where} to be {expected}, got {shown(value)}.")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in entries.items()})
