"""Predicted beside published: what others measured on GPUs, planned as it was run.

.. code-block:: bash

    python benchmarks/published.py
    python benchmarks/published.py --sets '[A,B]'

Nothing is trained, and no GPU is needed: models are built without weights. Rates of a set are calibrated by one of its
rows; the others are predicted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.section import PICTURES, kept_in, measured
from benchmarks.measures.simulated.published import cases, section


def main(
    sets: list[str] | None = None,
    *,
    output: Path | None = None,
    picture: Path | None = PICTURES / "published.svg",
    quick: bool = False,
    fresh: bool = False,
) -> None:
    """Predicts every row, prints a table and what was wanted, and writes JSON.

    Args:
        sets: Names of the sets; null for all.
        output: JSON file; rows that it has already are not predicted again. null: the one beside this program, or none
            if quick.
        picture: SVG to draw, unless quick, which needs matplotlib; null for none.
        quick: Whether to predict set B only.
        fresh: Whether to predict again what the file has.
    """
    wanted = ["B"] if quick else sets
    chosen = [case for case in cases() if wanted is None or case.set in wanted]
    with kept_in(output, "published", quick=quick) as results:
        asked = section(chosen)
        measured(asked, results, is_fresh=fresh)
        rows = results.stored(asked.name)
    if picture is not None and not quick:
        from benchmarks.pictures.published import draw

        draw(rows, picture)


if __name__ == "__main__":
    auto_cli(main)
