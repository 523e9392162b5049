"""OSDP against FSDP with activation checkpointing, where memory is too short to do without, on links of a chosen rate.

.. code-block:: bash

    python benchmarks/activations.py
    python benchmarks/activations.py --quick true

FSDP recomputes every block: in the order that torch is best in (a unit for each block, checkpointed inside), and in the
paper's (a unit for each Linear, inside of checkpointed blocks). Every case is written as soon as it is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.beside_fsdp import recompute
from benchmarks.measures.section import kept_in, measured

RATES_MBIT = (200.0, 1000.0)


def main(output: Path | None = None, num_rounds: int = 3, quick: bool = False, fresh: bool = False) -> None:
    """Measures every model on links of every rate, prints table and targets, and writes JSON.

    Args:
        output: JSON file; cases that it has already are not measured again. null: the one beside this program, or none
            if quick.
        num_rounds: timed steps of each that takes part; the fastest counts.
        quick: Whether to go through all of it with a tiny model on two ranks whose links are not shaped.
        fresh: Whether to measure again what the file has.
    """
    chosen = [("tiny", None)] if quick else [(name, rate) for name in recompute.MODELS for rate in RATES_MBIT]
    with kept_in(output, "activations", quick=quick) as results:
        cases = [
            recompute.Case(
                model=model, num_ranks=2 if quick else 4, rate_mbit=rate, micro_batch_size=2, num_rounds=num_rounds
            )
            for model, rate in chosen
        ]
        measured(recompute.section(cases), results, is_fresh=fresh)


if __name__ == "__main__":
    auto_cli(main)
