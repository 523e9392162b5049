"""What OSDP's plans are to reach under gradient accumulation, over ``fully_shard`` and Lightning's FSDP."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measures.beside_fsdp.baselines import BASE
from benchmarks.measures.beside_fsdp.contest import BEYOND_LIMIT, of_best_other, over_limit, ratio
from benchmarks.measures.links import rate_of
from benchmarks.measures.section import Row, Target

SPACES = {"OSDP": {"activations": ["keep"]}}
LIMITS = (1.0, 1.15, None)
"""Factors of the counted peak of `BASE` with the user's micro-batches; None: unlimited."""
TO_REACH = {1.0: 1.15, 1.15: 1.6, None: 2.9}
"""Limit -> samples/s over those of `BASE`, with the user's micro-batches held, at `TO_REACH_MBIT`."""
TO_REACH_MBIT = 200.0
OF_BETTER = 0.97
"""Samples/s that OSDP has at least, of those of the better baseline that fits."""


def targets(rows: Sequence[Row]) -> list[Target]:
    """Of shaped links: what to reach over `BASE` and over the better baseline, and what not to take."""
    found = []
    for row in rows:
        case = row["case"]
        for osdp in (each for each in row["entrants"] if each["name"] == "OSDP"):
            limit = osdp["limit"]
            where = f"{rate_of(row)}, {case['division']}, {'unlimited' if limit is None else f'{limit:g}x'}"
            if limit is not None:
                over = over_limit(row, osdp)
                found.append(Target(name=f"{where}: bytes of the limit", limit=BEYOND_LIMIT, measured=over))
            if case["rate_mbit"] is None:
                continue
            over_base = ratio(row, osdp)
            if case["rate_mbit"] == TO_REACH_MBIT and case["division"] == "held" and over_base is not None:
                name = f"{where}: over {BASE.name}"
                found.append(Target(name=name, limit=TO_REACH[limit], measured=over_base, is_least=True))
            over_better = of_best_other(row, osdp)
            name = f"{where}: over the better baseline"
            found.append(Target(name=name, limit=OF_BETTER, measured=over_better, is_least=True))
    return found
