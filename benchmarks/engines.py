"""OSDP beside ``fully_shard`` by hand and Lightning's strategies: step times, peaks, and where time goes.

.. code-block:: bash

    python benchmarks/engines.py
    python benchmarks/engines.py --quick true

All blocks of a model are units in one mode. Contestants take turns on four ranks, over links of a chosen rate. Every
case is written as soon as it is measured: a run that was killed goes on where it was.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.beside_fsdp.engines import Case, breakdown, peaks, times
from benchmarks.measures.section import kept_in, measured

MODES = ("ZDP", "DP")
RATES_MBIT = (200.0, 1000.0, None)

Name = Literal["times", "peaks", "breakdown"]


def main(
    sections: list[Name] = ["peaks", "breakdown", "times"],  # noqa: B006 -- a list shows its default
    *,
    output: Path | None = None,
    num_rounds: int = 30,
    quick: bool = False,
    fresh: bool = False,
) -> None:
    """Measures sections, prints tables and targets, and writes JSON.

    Args:
        sections: What to measure: peaks of a step, where its time goes, or step times in turns.
        output: JSON file; cases that it has already are not measured again. null: the one beside this program, or none
            if quick.
        num_rounds: timed steps of each that takes part.
        quick: Whether to go through all of it with a tiny model on two ranks whose links are not shaped.
        fresh: Whether to measure again what the file has.
    """
    rates_mbit = (None,) if quick else RATES_MBIT

    def case(mode: str, rate_mbit: float | None = None) -> Case:
        return Case(
            model="tiny" if quick else "12 x 256",
            mode=mode,
            num_ranks=2 if quick else 4,
            rate_mbit=rate_mbit,
            num_rounds=1 if quick else num_rounds,
        )

    on_links = [case(mode, rate_mbit) for rate_mbit in rates_mbit for mode in MODES]
    not_shaped = [case(mode) for mode in MODES]
    made = {"times": times(on_links), "peaks": peaks(not_shaped), "breakdown": breakdown(not_shaped)}
    with kept_in(output, "engines", quick=quick) as results:
        for name in sections:
            measured(made[name], results, is_fresh=fresh)


if __name__ == "__main__":
    auto_cli(main)
