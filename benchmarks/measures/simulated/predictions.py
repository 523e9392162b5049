"""Errors of predictions where steps were measured, from the files that benchmarks have written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

_PAIRS = (("predicted_s", "measured_s"), ("predicted_bytes", "counted_bytes"))


def errors(path: Path) -> tuple[list[float], list[float]]:
    """Relative errors of seconds and of peaks: of all in the file of whom both numbers are known."""
    entrants = list(_entrants(path))
    seconds, peaks = (
        [abs(each[predicted] / each[found] - 1) for each in entrants if each.get(predicted) and each.get(found)]
        for predicted, found in _PAIRS
    )
    return seconds, peaks


def table(paths: Sequence[Path]) -> Table:
    """Median and worst error by file, and of all."""
    drawn = Table("measured by", title="The simulator's error where steps were measured: median / worst")
    for column in ("step time", "peak of live bytes"):
        drawn.add_column(column, justify="right")
    every: tuple[list[float], list[float]] = ([], [])
    for path in paths:
        if not path.exists():
            drawn.add_row(path.name, "not measured yet", "")
            continue
        found = errors(path)
        for known, more in zip(every, found, strict=True):
            known.extend(more)
        drawn.add_row(path.name, *map(_in_words, found))
    drawn.add_row("all", *map(_in_words, every))
    return drawn


def _entrants(path: Path) -> Iterator[dict[str, Any]]:
    for section in json.loads(path.read_text()).values():
        for row in section["rows"]:
            yield from row.get("entrants", ())


def _in_words(found: Sequence[float]) -> str:
    return f"{median(found):.1%} / {max(found):.1%} ({len(found)})" if found else "none"
