"""Values with a file of their own: dataclasses as JSON text, and back; reading a file executes nothing of it."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from typing_extensions import Self

from lightning_osdp.core.plans.document import fields_of, shown, write_whole
from lightning_osdp.errors import PlanFormatError

PLAN_FILENAME, PROFILE_FILENAME, CLUSTER_FILENAME = "osdp_plan.json", "osdp_profile.json", "osdp_cluster.json"
"""Files that a fit writes: its plan, and the profile and cluster that it was made of."""
SCHEMA_VERSION = 1
_MOST = 2.0**63


class Stored:
    """A dataclass of numbers, texts, tuples, mappings by name, and dataclasses of these, which has files of its own.

    Its document has ``schema_version``, ``kind`` (the name of the class) and ``value``; fields that have their default
    are left out.
    """

    def to_json(self) -> str:
        """JSON text, in one line."""
        document = {"schema_version": SCHEMA_VERSION, "kind": type(self).__name__, "value": _plain(self)}
        return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "the text") -> Self:
        """The value of what `to_json` wrote.

        Args:
            text: JSON text.
            source: what to call the text in errors, such as its path.

        Raises:
            PlanFormatError: not JSON, of another kind or schema version, or an entry is missing, unknown or of another
                type.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanFormatError(f"Expected {source} to be JSON, but it cannot be parsed: {error}.") from error
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind != cls.__name__:
            raise PlanFormatError(
                f"Expected {source} to be a {cls.__name__} that a fit has written, got one of kind {shown(kind)}."
            )
        if document.get("schema_version") != SCHEMA_VERSION:
            raise PlanFormatError(
                f"Expected {source} to have schema_version {SCHEMA_VERSION}, got"
                f" {shown(document.get('schema_version'))}. Profile anew with this version of lightning_osdp."
            )
        found: Self = read_value(cls, document.get("value"), f"{source} at {cls.__name__}")
        return found

    def save(self, path: str | Path) -> None:
        """Writes it as JSON; the file appears only when it is complete."""
        write_whole(self.to_json(), path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The value in a file that `save` wrote.

        Raises:
            PlanFormatError: there is no such file, or it holds something else.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # not text in UTF-8, or a path that no file can have
            raise PlanFormatError(
                f"Expected a {cls.__name__} at {str(path)!r}, but it cannot be read: {error}. A fit"
                " that plans writes one beside its plan."
            ) from error
        return cls.from_json(text, source=f"file {str(path)!r}")


def _plain(value: Any) -> Any:
    """Of what JSON knows."""
    if dataclasses.is_dataclass(value):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: _plain(of) for f, of in fields if of != _default(f)}
    if isinstance(value, Mapping):
        return {name: _plain(of) for name, of in value.items()}
    return [_plain(of) for of in value] if isinstance(value, tuple) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    """A field's default; MISSING, which no value equals, if it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def read_value(hint: Any, value: Any, where: str) -> Any:
    """A value of this type, a dataclass or that of a field, from what JSON or TOML has of it; errors say where.

    Raises:
        PlanFormatError: an entry is missing, unknown or of another type.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # something or None
        return None if value is None else read_value(inner[0], value, where)
    if dataclasses.is_dataclass(hint):
        return _read_fields(typing.cast("type", hint), value, where)
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
        _check(is_number, "a whole number" if hint is int else "a finite number", value, where)
        _check(value >= 0, "at least 0", value, where)
    else:
        _check(type(value) is hint, {str: "a text", bool: "true or false"}[hint], value, where)
    return value


def _read_fields(kind: type, value: Any, where: str) -> Any:
    _check(isinstance(value, dict), "an object", value, where)
    fields_of(kind, value, where, f"a {kind.__name__}")
    return kind(**{name: read_value(_hints(kind)[name], of, f"{where}.{name}") for name, of in value.items()})


def _check(is_so: bool, expected: str, value: object, where: str) -> None:
    if not is_so:
        raise PlanFormatError(f"Expected {where} to be {expected}, got {shown(value)}.")
