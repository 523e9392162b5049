"""OSDP against FSDP on machines that are not here, simulated: the paper's sizes on its GPUs, and today's on today's.

.. code-block:: bash

    python benchmarks/cluster.py
    python benchmarks/cluster.py --quick true

Nothing is trained. Models are profiled on the meta device by the rates of the GPUs, plans are searched as in training,
and every contestant takes the micro-batch with the most samples/s under the limit, one in each step. Beside it stands
how far the simulator was off where steps were measured. Every case is written as soon as it is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.section import PICTURES, RESULTS, kept_in, measured, wide_console
from benchmarks.measures.simulated import predictions
from benchmarks.measures.simulated.cluster import Case, section
from benchmarks.measures.simulated.machines import NODE, NODES, TITANS, Model
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
TODAYS = (
    (NODE, ("24 x 2048", "32 x 4096", "40 x 5120")),
    (NODES, ("32 x 4096", "40 x 5120", "80 x 8192")),
)
TODAYS_LIMIT_GIB = 72.0
"""Of 80 GB: the rest is for the context, the communicator's buffers, and fragments."""


def cases() -> list[Case]:
    """The paper's sizes in samples of 512 tokens out of 256, today's in samples of 2048 tokens out of 32000.

    The paper's program draws 96 sequences of 6 tokens out of 10 where it counts a sample.
    """
    papers = [
        Case(
            machine=TITANS,
            model=Model(family=family, layers=layers, sequence_length=512, vocabulary_size=256),
            limit_gib=limit_gib,
        )
        for family, layers in PAPERS
        for limit_gib in PAPERS_LIMITS_GIB
    ]
    todays = [
        Case(
            machine=machine,
            model=Model(family="usual", layers=layers, sequence_length=2048, vocabulary_size=32000),
            limit_gib=TODAYS_LIMIT_GIB,
        )
        for machine, all_layers in TODAYS
        for layers in all_layers
    ]
    return [*papers, *todays]


def quick_cases() -> list[Case]:
    """One of a few seconds."""
    model = Model(family=CHANGING, layers="1 x 256 + 1 x 512", sequence_length=256, vocabulary_size=64)
    return [Case(machine=TITANS, model=model, limit_gib=0.05)]


def main(
    output: Path | None = None,
    picture: Path | None = PICTURES / "cluster.svg",
    quick: bool = False,
    fresh: bool = False,
) -> None:
    """Simulates every case, prints tables, and writes JSON.

    Args:
        output: JSON file; cases that it has already are not simulated again. null: the one beside this program, or none
            if quick.
        picture: SVG to draw, unless quick, which needs matplotlib; null for none.
        quick: Whether to go through all of it with a tiny model.
        fresh: Whether to simulate again what the file has.
    """
    with kept_in(output, "cluster", quick=quick) as results:
        asked = section(quick_cases() if quick else cases())
        measured(asked, results, is_fresh=fresh)
        rows = results.stored(asked.name)
    console = wide_console()
    console.print(ratios(rows))
    console.print(beside_papers([row for row in rows if row["case"]["machine"]["name"] == TITANS.name]))
    console.print(predictions.table(MEASURED))
    if picture is not None and not quick:
        from benchmarks.pictures.cluster import draw

        draw(rows, picture)


if __name__ == "__main__":
    auto_cli(main)
