"""OSDP against FSDP on machines that are not here, simulated: the paper's models on its GPUs, and Llamas on nodes.

.. code-block:: bash

    python benchmarks/cluster.py
    python benchmarks/cluster.py --quick true

Nothing is trained. Models are profiled on the meta device by the rates of the GPUs, plans are searched as in training,
and every contestant takes its best micro-batch under the limit: one of any size in each step, as the paper does
(``papers``), or as many as make up a global batch (``nodes``). Beside it stands how far the simulator was off where
steps were measured. Every case is written as soon as it is there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.section import PICTURES, RESULTS, kept_in, measured, wide_console
from benchmarks.measures.simulated import nodes, predictions
from benchmarks.measures.simulated.cluster import Case, section
from benchmarks.measures.simulated.machines import TITANS, Model
from benchmarks.measures.simulated.tables import CHANGING, NARROW, WIDE, beside_papers, ratios

MEASURED = tuple(RESULTS / f"{name}.json" for name in ("headline", "activations", "accumulation"))
"""What has predicted and measured steps."""

PAPERS = (
    (NARROW, "48 x 1024"),
    (NARROW, "96 x 1024"),
    (NARROW, "48 x 2048"),
    (WIDE, "2 x 8192"),
    (WIDE, "2 x 12288"),
    (CHANGING, "8 x 1024 + 8 x 2048 + 4 x 4096"),
    (CHANGING, "4 x 1024 + 4 x 2048 + 12 x 4096 + 2 x 6144"),
)
PAPERS_LIMITS_GIB = (8.0, 16.0)
Name = Literal["papers", "nodes"]


def cases() -> list[Case]:
    """The paper's sizes in samples of 512 tokens out of 256.

    The paper's program draws 96 sequences of 6 tokens out of 10 where it counts a sample.
    """
    return [
        Case(
            machine=TITANS,
            model=Model(family=family, layers=layers, sequence_length=512, vocabulary_size=256),
            limit_gib=limit_gib,
        )
        for family, layers in PAPERS
        for limit_gib in PAPERS_LIMITS_GIB
    ]


def quick_cases() -> list[Case]:
    """One of a few seconds."""
    model = Model(family=CHANGING, layers="1 x 256 + 1 x 512", sequence_length=256, vocabulary_size=64)
    return [Case(machine=TITANS, model=model, limit_gib=0.05)]


def main(
    sections: list[Name] = ["papers", "nodes"],  # noqa: B006 -- a list shows its default
    output: Path | None = None,
    pictures: Path | None = PICTURES,
    quick: bool = False,
    fresh: bool = False,
) -> None:
    """Simulates every case, prints tables, and writes JSON.

    Args:
        sections: What to simulate: the paper's models on its GPUs, or Llama-like ones on nodes of today's.
        output: JSON file; cases that it has already are not simulated again. null: the one beside this program, or none
            if quick.
        pictures: Folder of the pictures, which need matplotlib; null for none. None are drawn if quick.
        quick: Whether to go through all of it with tiny models.
        fresh: Whether to simulate again what the file has.
    """
    console = wide_console()
    with kept_in(output, "cluster", quick=quick) as results:
        if "papers" in sections:
            measured(section(quick_cases() if quick else cases()), results, is_fresh=fresh)
            rows = results.stored("papers")
            console.print(ratios(rows))
            console.print(beside_papers(rows))
        if "nodes" in sections:
            measured(nodes.section(nodes.quick_cases() if quick else nodes.cases()), results, is_fresh=fresh)
        console.print(predictions.table(MEASURED))
        if pictures is not None and not quick:
            from benchmarks.pictures.cluster import draw, draw_nodes

            if "papers" in sections:
                draw(results.stored("papers"), pictures / "cluster.svg")
            if "nodes" in sections:
                draw_nodes(results.stored("nodes"), pictures / "cluster_nodes.svg")


if __name__ == "__main__":
    auto_cli(main)
