"""How far a long computation has come, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, str], None]
"""Takes a stage and how far it has come: ``progress("timing 8 samples", "run 2 of 6")``; the second may be empty.
"""


def silent(stage: str, detail: str) -> None:
    """Shows nothing."""
