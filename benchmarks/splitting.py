"""What splitting operators costs and saves: peak memory, step time, and the decisions between ZDP and DP.

.. code-block:: bash

    python benchmarks/splitting.py --quick true

Every case is written to the results file as soon as it is measured: a run that was killed goes on where it was.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.section import PICTURES, Section, kept_in, measured
from benchmarks.measures.splitting import decisions, peaks, step_time

QUICK = (1024,)
"""Hidden sizes of a quick run."""
Name = Literal["peaks", "time", "decisions"]


def main(
    sections: list[Name] = ["peaks", "time", "decisions"],  # noqa: B006 -- a list shows its default
    output: Path | None = None,
    pictures: Path | None = PICTURES,
    quick: bool = False,
    fresh: bool = False,
) -> None:
    """Measures sections, prints their tables and targets, writes JSON and draws pictures.

    Args:
        sections: What to measure.
        output: JSON file; cases that it has already are not measured again. null: `splitting.json` beside the others,
            or none if quick.
        pictures: Folder of the pictures, which need matplotlib; null for none. None are drawn if quick.
        quick: Whether to measure the smallest layers and few rounds only.
        fresh: Whether to measure again what the file has of these sections.
    """
    with kept_in(output, "splitting", quick=quick) as results:
        for name in sections:
            measured(_section(name, is_quick=quick), results, is_fresh=fresh)
        if pictures is not None and not quick:
            from benchmarks.pictures.splitting import draw_decisions, draw_peaks, draw_times

            draw_peaks(results.stored("peaks"), pictures / "splitting_memory.svg")
            draw_times(results.stored("time"), pictures / "splitting_time.svg")
            draw_decisions(results.stored("decisions"), pictures / "splitting_decisions.svg")


def _section(name: Name, *, is_quick: bool) -> Section:
    if name == "peaks":
        return peaks.section(QUICK if is_quick else peaks.HIDDEN_SIZES)
    if name == "time":
        return step_time.section(QUICK if is_quick else (*step_time.MEASURED, *step_time.PREDICTED))
    return decisions.section(2 if is_quick else decisions.NUM_ROUNDS)


if __name__ == "__main__":
    auto_cli(main)
