"""The paper's figure 5, measured: OSDP against FSDP, each at its best, on three families of models.

.. code-block:: bash

    python benchmarks/headline.py
    python benchmarks/headline.py --quick true

Four ranks over links of a chosen rate. Peaks of what OSDP is compared with are counted first. Every case is written as
soon as it is measured: a run that was killed goes on where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.beside_fsdp import baselines, contest, headline
from benchmarks.measures.section import PICTURES, Section, kept_in, measured
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Baseline

Name = Literal["one", "global", "loose"]


_FEW_WAYS = (baselines.BASE, headline.CHECKPOINTING, baselines.FULL_SHARD, headline.DDP)
QUICK = headline.Sizes(models=("tiny",), ways=_FEW_WAYS, num_ranks=2, rates_mbit=(None,), samples_per_step=2)


def main(
    sections: list[Name] = ["one", "global", "loose"],  # noqa: B006 -- a list shows its default
    *,
    output: Path | None = None,
    pictures: Path | None = PICTURES,
    num_rounds: int = 6,
    quick: bool = False,
    fresh: bool = False,
) -> None:
    """Counts what the others take, measures sections, prints tables and targets, and writes JSON.

    Args:
        sections: What to measure: one micro-batch a step of any size, as the paper does; a global batch that is fixed,
            however it is divided; or the first under a limit of twice the memory.
        output: JSON file; cases that it has already are not measured again. null: the one beside this program, or none
            if quick.
        pictures: Folder of the pictures, which need matplotlib; null for none. None are drawn if quick.
        num_rounds: timed steps of each that takes part; the fastest counts. (The first few
            take longer where much memory is gathered and freed.)
        quick: Whether to go through all of it with a tiny model on two ranks whose links are not shaped.
        fresh: Whether to measure again what the file has.
    """
    sizes = QUICK if quick else headline.Sizes()
    with kept_in(output, "headline", quick=quick) as results:
        known = sizes.known(results, limits=(*headline.LIMITS, *headline.LOOSE_LIMITS), is_fresh=fresh)
        for name in sections:
            measured(_contest(name, sizes, known, num_rounds), results, is_fresh=fresh)
        if pictures is not None and not quick:
            from benchmarks.pictures.headline import draw  # matplotlib is not needed for measuring

            for each in ("one", "global"):
                draw(results.stored(each), pictures, f"headline_{each}")


def _contest(name: Name, sizes: headline.Sizes, known: Mapping[str, Sequence[Baseline]], num_rounds: int) -> Section:
    is_global = name == "global"
    return contest.section(
        name,
        sizes.cases(
            is_global=is_global,
            limits=headline.LOOSE_LIMITS if name == "loose" else headline.LIMITS,
            num_rounds=num_rounds,
            limited_at_mbit=headline.AT_MBIT if name == "one" else None,
        ),
        known,
        spaces=headline.GLOBAL_SPACES if is_global else headline.ONE_SPACES,
        targets=headline.targets_of_global if is_global else headline.targets_of_one,
    )


if __name__ == "__main__":
    auto_cli(main)
