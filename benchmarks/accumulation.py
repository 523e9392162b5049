"""Gradient accumulation under OSDP's plans against ``fully_shard`` and Lightning's own FSDP, on links of a chosen rate.

.. code-block:: bash

    python benchmarks/accumulation.py
    python benchmarks/accumulation.py --quick true

Baselines' peaks are counted first; each rate is then measured with the user's micro-batches held, and with the samples
of a step divided anew. Every case is written as soon as it is measured: a run that was killed goes on where it was.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.beside_fsdp import accumulation, baselines, contest
from benchmarks.measures.section import kept_in, measured

Name = Literal["held", "auto"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is trained, and where."""

    model: str = "6 x 512"
    num_ranks: int = 4
    rates_mbit: tuple[float | None, ...] = (200.0, 1000.0)
    """10^6 bit/s; None: not shaped."""
    micro_batch_size: int = 2
    num_micro_batches: int = 4


QUICK = Sizes(model="tiny", num_ranks=2, rates_mbit=(None,), micro_batch_size=1, num_micro_batches=2)


def main(
    sections: list[Name] = ["held", "auto"],  # noqa: B006 -- a list shows its default
    output: Path | None = None,
    num_rounds: int = 3,
    quick: bool = False,
    fresh: bool = False,
) -> None:
    """Counts what baselines take, measures sections, prints tables and targets, and writes JSON.

    Args:
        sections: What to measure: the user's micro-batches held, or the samples of a step divided anew.
        output: JSON file; cases that it has already are not measured again. null: the one beside this program, or none
            if quick.
        num_rounds: timed steps of each that takes part; the fastest counts.
        quick: Whether to go through all of it with a tiny model on two ranks whose links are not shaped.
        fresh: Whether to measure again what the file has.
    """
    sizes = QUICK if quick else Sizes()
    with kept_in(output, "accumulation", quick=quick) as results:
        samples_per_step = sizes.micro_batch_size * sizes.num_micro_batches
        known = baselines.known(
            [sizes.model],
            results,
            is_fresh=fresh,
            num_ranks=sizes.num_ranks,
            ways=[baselines.BASE, baselines.KEPT, baselines.FULL_SHARD, baselines.SHARD_GRAD_OP],
            samples_per_step=samples_per_step,
        )
        for name in sections:
            cases = [
                contest.Case(
                    model=sizes.model,
                    num_ranks=sizes.num_ranks,
                    rate_mbit=rate_mbit,
                    division=name,
                    limits=accumulation.LIMITS,
                    micro_batch_size=sizes.micro_batch_size,
                    num_micro_batches=sizes.num_micro_batches,
                    num_rounds=num_rounds,
                )
                for rate_mbit in sizes.rates_mbit
            ]
            section = contest.section(name, cases, known, spaces=accumulation.SPACES, targets=accumulation.targets)
            measured(section, results, is_fresh=fresh)


if __name__ == "__main__":
    auto_cli(main)
