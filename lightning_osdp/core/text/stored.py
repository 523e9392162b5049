"""Values with a file of their own: dataclasses as JSON text, and back; reading a file executes nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

from typing_extensions import Self

from lightning_osdp.core.plans.document import as_json, read_value, shown, write_whole
from lightning_osdp.errors import PlanFormatError

PLAN_FILENAME, PROFILE_FILENAME, CLUSTER_FILENAME = "osdp_plan.json", "osdp_profile.json", "osdp_cluster.json"
"""Files that a fit writes: its plan, and the profile and cluster that it was made of."""
SCHEMA_VERSION = 1


class Stored:
    """A dataclass of numbers, texts, tuples, mappings by name, and dataclasses of these, which has files of its own.

    Its document has ``schema_version``, ``kind`` (the name of the class) and ``value``; fields that have their default
    are left out.
    """

    def to_json(self) -> str:
        """JSON text, in one line."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "kind": type(self).__name__,
            "value": as_json(self, skips_defaults=True),
        }
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
