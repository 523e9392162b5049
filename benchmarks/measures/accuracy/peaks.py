"""Predicted peaks beside counted ones: table, targets, and what to say of those that miss."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.measures.section import Row, Target
from benchmarks.testbed.memory import PHASES

TOO_HIGH, TOO_LOW = 0.02, 0.01
"""Fractions by which a whole step's peak may be predicted above and below what is counted."""


def compared(predicted: Mapping[str, int], counted: Mapping[str, int]) -> dict[str, Any]:
    """Bytes by phase, and the error of the largest: positive where it was predicted too high."""
    error = max(predicted.values()) / max(counted.values()) - 1
    return {"predicted": dict(predicted), "counted": dict(counted), "error": error}


def table(rows: Sequence[Row], title: str) -> Table:
    """Errors by family: of the whole step, and of each phase."""
    drawn = Table(
        "family",
        title=title,
        caption="lowest and highest error; positive: predicted too high",
    )
    for column in ("cases", "whole step", "median size", *PHASES):
        drawn.add_column(column, justify="right")
    families = list(dict.fromkeys(row["case"]["family"] for row in rows))
    for name, found in [*((name, _of_family(rows, name)) for name in families), ("all", rows)]:
        errors = [row["error"] for row in found]
        size = statistics.median(abs(error) for error in errors)
        drawn.add_row(
            name,
            str(len(found)),
            _range(errors),
            f"{size:.3%}",
            *(_range([errors[phase] for errors in map(phase_errors, found) if phase in errors]) for phase in PHASES),
        )
    return drawn


def targets(rows: Sequence[Row], name: str) -> list[Target]:
    """The worst error in either direction."""
    errors = [row["error"] for row in rows]
    return [
        Target(name=f"{name}: predicted too high by", limit=TOO_HIGH, measured=max(0.0, *errors)),
        Target(name=f"{name}: predicted too low by", limit=TOO_LOW, measured=max(0.0, *(-error for error in errors))),
    ]


def misses(rows: Sequence[Row]) -> list[str]:
    """Lines for the rows whose errors are too large: the case, and by how much which phase is wrong."""
    found = []
    for row in rows:
        if not -TOO_LOW < row["error"] < TOO_HIGH:
            case = ", ".join(f"{key} {value}" for key, value in row["case"].items())
            phases = ", ".join(f"{phase} {error:+.2%}" for phase, error in phase_errors(row).items())
            found.append(f"{row['error']:+.2%}: {case}: {phases}")
    return found


def phase_errors(row: Row) -> dict[str, float]:
    """Errors of the phases that both were found in."""
    counted, predicted = row["counted"], row["predicted"]
    return {phase: predicted[phase] / counted[phase] - 1 for phase in counted if phase in predicted}


def _of_family(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["case"]["family"] == name]


def _range(errors: Sequence[float]) -> str:
    return f"{min(errors):+.2%} {max(errors):+.2%}" if errors else ""
