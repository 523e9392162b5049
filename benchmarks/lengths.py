"""Batches of many lengths under one memory limit: a plan that changes for long ones, or the plan for the longest.

.. code-block:: bash

    python benchmarks/lengths.py
    python benchmarks/lengths.py --quick true

The limit is 5% above what the fastest plan for the shortest batches takes, in quick form 30%. Ranks are processes of
this machine, and links are not shaped. Every case is written as soon as it is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures import lengths
from benchmarks.measures.section import kept_in, measured


def main(output: Path | None = None, quick: bool = False, fresh: bool = False) -> None:
    """Trains in every order of lengths, prints a table and targets, and writes JSON.

    Args:
        output: JSON file; cases that it has already are not measured again. null: the one of this name beside the
            others, or none if quick.
        quick: Whether to go through all of it with a tiny model.
        fresh: Whether to measure again what the file has.
    """
    with kept_in(output, "lengths", quick=quick) as results:
        measured(lengths.section(lengths.QUICK_CASES if quick else lengths.CASES), results, is_fresh=fresh)


if __name__ == "__main__":
    auto_cli(main)
