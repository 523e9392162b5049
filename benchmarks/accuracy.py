"""Predictions against measurements: peak memory, the fit of plans, step time, and the cost of planning.

.. code-block:: bash

    python benchmarks/accuracy.py --sections [memory,gloo]

Every case is written to the results file as soon as it is measured: a run that was killed goes on where it was.
Sections that are not run are kept. Cases are seeded: two runs count the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.accuracy import collectives, fits, gloo, memory, planning, step_time
from benchmarks.measures.section import PICTURES, RESULTS, Results, measured

Name = Literal["memory", "gloo", "fits", "planning", "time", "overlap", "collectives"]
SECTIONS = {
    "memory": memory.section,
    "gloo": gloo.section,
    "fits": fits.section,
    "planning": planning.section,
    "time": step_time.section,
    "overlap": step_time.overlap_section,
    "collectives": collectives.section,
}


def main(
    sections: list[Name] = [*SECTIONS],  # type: ignore[list-item]  # noqa: B006 -- a list shows its default
    output: Path = RESULTS / "accuracy.json",
    pictures: Path | None = PICTURES,
    num_cases: int = 20,
    fresh: bool = False,
) -> None:
    """Measures sections, prints their tables and targets, writes JSON and draws pictures of memory.

    Args:
        sections: What to measure.
        output: JSON file; cases that it has already are not measured again.
        pictures: Folder of the pictures, which need matplotlib; null for none.
        num_cases: Random cases of each family; some sections take fewer.
        fresh: Whether to measure again what the file has of these sections.
    """
    results = Results(output)
    for name in sections:
        measured(SECTIONS[name](num_cases), results, is_fresh=fresh)
    print(f"Written to {output}")
    if pictures is not None:
        from benchmarks.pictures.memory import draw_peaks, draw_step

        measured_on = {"rank 0 of N alone": "memory", "real ranks, gloo": "gloo"}
        draw_peaks(
            {where: results.stored(name) for where, name in measured_on.items()}, pictures / "accuracy_memory.svg"
        )
        draw_step(pictures / "memory_over_step.svg")


if __name__ == "__main__":
    auto_cli(main)
