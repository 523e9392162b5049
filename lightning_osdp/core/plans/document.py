"""Dataclasses as JSON, and back from JSON that people may have edited: each entry is checked, errors have its place."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lightning_osdp.core.axes import AXES, Treatment
from lightning_osdp.errors import ConfigurationError, PlanFormatError

_MOST = 2**63
"""Numbers are below it: torch and Lightning count to no more."""


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


def as_json(value: Any, *, skips_defaults: bool = False) -> Any:
    """A dataclass, or a value of one of its fields, as JSON knows it; fields with their default may be left out."""
    if dataclasses.is_dataclass(value):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        kept = ((f.name, of) for f, of in fields if not skips_defaults or of != _default(f))
        return {name: as_json(of, skips_defaults=skips_defaults) for name, of in kept}
    if isinstance(value, Mapping):
        return {name: as_json(of, skips_defaults=skips_defaults) for name, of in value.items()}
    return [as_json(of, skips_defaults=skips_defaults) for of in value] if isinstance(value, tuple) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    """A field's default; MISSING, which no value equals, if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def read_value(hint: Any, value: Any, where: str) -> Any:
    """A value of this type, a dataclass or that of a field, from what JSON or TOML has of it; errors call it ``where``.

    Raises:
        PlanFormatError: an entry is missing, unknown, of another type, negative or too large.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # something or None
        return None if value is None else read_value(inner[0], value, where)
    if hint is Treatment or dataclasses.is_dataclass(hint):
        return _read_treatment(value, where) if hint is Treatment else _read_fields(hint, value, where)
    if origin is Mapping:
        _check(isinstance(value, dict), "an object", value, where)
        return {name: read_value(inner[1], of, f"{where}[{name!r}]") for name, of in value.items()}
    if origin is tuple or hasattr(hint, "_fields"):
        _check(isinstance(value, list), "a list", value, where)
        if inner[1:] == (...,):
            return tuple(read_value(inner[0], of, f"{where}[{index}]") for index, of in enumerate(value))
        kinds = inner or tuple(_hints(hint).values())
        _check(len(value) == len(kinds), f"a list of {len(kinds)}", value, where)
        parts = [
            read_value(kind, of, f"{where}[{index}]") for index, (kind, of) in enumerate(zip(kinds, value, strict=True))
        ]
        return hint(*parts) if hasattr(hint, "_fields") else tuple(parts)
    if hint in {int, float}:
        types_ = (int,) if hint is int else (int, float)
        is_number = isinstance(value, types_) and not isinstance(value, bool) and -_MOST < value < _MOST
        _check(is_number, "a whole number below 2^63" if hint is int else "a finite number", value, where)
        _check(value >= 0, "at least 0", value, where)
    else:
        _check(type(value) is hint, {str: "a text", bool: "true or false"}[hint], value, where)
    return value


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    _check(isinstance(value, dict), "an object", value, where)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    required = {name for name, f in fields.items() if _default(f) is dataclasses.MISSING}
    missing, unknown = required - value.keys(), value.keys() - fields.keys()
    if missing or unknown:
        raise PlanFormatError(
            f"Expected {where} to have the entries of {kind.__name__}; missing: {sorted(missing)}, unknown:"
            f" {sorted(unknown)}."
        )
    entries = {name: read_value(_hints(kind)[name], of, f"{where}.{name}") for name, of in value.items()}
    try:
        return kind(**entries)
    except ConfigurationError as error:
        raise PlanFormatError(f"Expected {where} to be possible, but: {error}") from error


def _read_treatment(value: Any, where: str) -> Treatment:
    _check(isinstance(value, dict), "an object of values by axis", value, where)
    value = {
        "sync" if name == "reduce" else name: chosen for name, chosen in value.items()
    }  # as plans of 0.2.0.dev0 had it
    for name, chosen in value.items():
        if name not in AXES:
            raise PlanFormatError(f"Expected axes of {where} to be among {tuple(AXES)}, got {shown(name)}.")
        _check(chosen in AXES[name].values, f"one of {AXES[name].values}", chosen, f"{where}.{name}")
    return Treatment(**value)


def _check(is_so: bool, expected: str, value: object, where: str) -> None:
    if not is_so:
        raise PlanFormatError(f"Expected {where} to be {expected}, got {shown(value)}.")
