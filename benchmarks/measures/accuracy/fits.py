"""Fit of plans in memory: training under a limit just above and just below the predicted peak."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from benchmarks.families import FAMILIES
from benchmarks.measures.accuracy.memory import Case, draw_cases, predict
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.limit import lives_under
from lightning_osdp.core.text.byte_size import format_bytes

MARGIN = 0.05
"""Fraction of the predicted peak: so far above it training must live, so far below it must die."""
NUM_RANKS, NUM_SAMPLES = 2, 8
"""Few ranks and many samples: of a peak of a few megabytes, 5% are less than what the allocator keeps of freed memory
and may use again for small tensors."""
NUM_CASES = 10
_SEED = 1
"""Seed of other cases than those whose memory is counted."""


def section(num_cases: int) -> Section:
    """One random case of each family, and a second of the first two."""
    drawn = [draw_cases(family, 2, seed=_SEED) for family in FAMILIES]
    cases = [*(first for first, _ in drawn), *(second for _, second in drawn)]
    cases = [replace(case, world_size=NUM_RANKS, micro_batch_size=NUM_SAMPLES) for case in cases]
    cases = [replace(case, frozen="nothing", reduce_dtype="bfloat16") for case in cases]
    return Section(
        name="fits",
        cases=cases[: min(num_cases, NUM_CASES)],
        measure=measure,
        table=table,
        targets=targets,
        misses=misses,
    )


def measure(case: Case) -> dict[str, Any]:
    """Trains a case twice, as rank 0 of its ranks in processes that may take so much and no more.

    Returns:
        ``predicted_bytes``; ``lived`` and ``reason`` for the limit ``above`` and ``below``.
    """
    estimate, plan = predict(case)
    predicted = estimate.peak.peak_bytes

    def outcome(margin: float) -> dict[str, Any]:
        limit_bytes = round(predicted * (1 + margin))
        return asdict(lives_under(limit_bytes, case.family, plan, optimizer=case.optimizer, precision=case.precision))

    with ThreadPoolExecutor(2) as pool:
        above, below = pool.map(outcome, (MARGIN, -MARGIN))
    return {"predicted_bytes": predicted, "above": above, "below": below}


def table(rows: Sequence[Row]) -> Table:
    """Table of the cases, and what became of each above and below the predicted peak."""
    drawn = Table("family", "precision", title="Does it fit?")
    for column in ("ranks", "samples", "predicted", f"{MARGIN:.0%} above", f"{MARGIN:.0%} below"):
        drawn.add_column(column, justify="right")
    for row in rows:
        case = row["case"]
        drawn.add_row(
            case["family"],
            case["precision"],
            str(case["world_size"]),
            str(case["micro_batch_size"]),
            format_bytes(row["predicted_bytes"]),
            *("lived" if row[name]["lived"] else "died" for name in ("above", "below")),
        )
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """Target that not one case is decided wrongly."""
    return [Target(name="fits: decided wrongly", limit=1, measured=len(misses(rows)))]


def misses(rows: Sequence[Row]) -> list[str]:
    """Lines for the cases that were decided wrongly."""
    found = []
    for row in rows:
        case = ", ".join(f"{key} {value}" for key, value in row["case"].items())
        if not row["above"]["lived"]:
            found.append(f"died {MARGIN:.0%} above: {case}: {row['above']['reason']}")
        if row["below"]["lived"]:
            found.append(f"lived {MARGIN:.0%} below: {case}")
    return found
