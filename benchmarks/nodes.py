"""OSDP against FSDP, each at its best, on nodes of two ranks each: links between nodes are slow, those inside are not.

.. code-block:: bash

    python benchmarks/nodes.py
    python benchmarks/nodes.py --quick true

Nodes are network namespaces, whose ranks share a link of a chosen rate. Peaks of what OSDP is compared with are counted
first. Every case is written as soon as it is measured: a run that was killed goes on where it was.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.beside_fsdp import contest, nodes
from benchmarks.measures.beside_fsdp.baselines import BASE
from benchmarks.measures.beside_fsdp.headline import DDP, Sizes
from benchmarks.measures.section import PICTURES, kept_in, measured

Name = Literal["links", "bytes", "global", "one"]

SIZES = Sizes(ways=nodes.WAYS, node_size=nodes.NODE_SIZE)
_FEW_WAYS = (BASE, nodes.HYBRID, nodes.HPZ, DDP)
QUICK = Sizes(models=("tiny",), ways=_FEW_WAYS, node_size=nodes.NODE_SIZE, rates_mbit=(None,), samples_per_step=2)


def main(
    sections: list[Name] = ["links", "bytes", "global", "one"],  # noqa: B006 -- a list shows its default
    *,
    output: Path | None = None,
    pictures: Path | None = PICTURES,
    num_rounds: int = 6,
    quick: bool = False,
    fresh: bool = False,
) -> None:
    """Counts what the others take, measures sections, prints tables and targets, and writes JSON.

    Args:
        sections: What to measure: whether links are what they should be; the bytes that nodes send each other, beside
            closed forms; a global batch that is fixed, however it is divided; or one micro-batch a step of any size.
        output: JSON file; cases that it has already are not measured again. null: the one beside this program, or none
            if quick.
        pictures: Folder of the pictures, which need matplotlib; null for none. None are drawn if quick.
        num_rounds: timed steps of each that takes part; the fastest counts.
        quick: Whether to go through all of it with a tiny model and links that are not shaped.
        fresh: Whether to measure again what the file has.
    """
    sizes = QUICK if quick else SIZES
    with kept_in(output, "nodes", quick=quick) as results:
        if "links" in sections:
            measured(nodes.links_section(sizes), results, is_fresh=fresh)
        known = sizes.known(results, limits=nodes.LIMITS, is_fresh=fresh)
        if "bytes" in sections:
            measured(nodes.bytes_section(sizes, known), results, is_fresh=fresh)
        for name in ("global", "one"):
            if name in sections:
                cases = sizes.cases(is_global=name == "global", limits=nodes.LIMITS, num_rounds=num_rounds)
                section = contest.section(name, cases, known, spaces=nodes.SPACES, targets=nodes.targets)
                measured(section, results, is_fresh=fresh)
        if pictures is not None and not quick:
            from benchmarks.pictures.headline import draw  # matplotlib is not needed for measuring
            from benchmarks.pictures.nodes import COLOURS

            for name in ("global", "one"):
                draw(results.stored(name), pictures, f"nodes_{name}", COLOURS)


if __name__ == "__main__":
    auto_cli(main)
