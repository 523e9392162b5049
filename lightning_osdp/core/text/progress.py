"""Progress of a long computation, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, str], None]
"""Takes a stage and its state: ``progress("timing 8 samples", "run 2 of 6")``; the state may be empty."""


def silent(stage: str, detail: str) -> None:
    """Shows nothing."""
