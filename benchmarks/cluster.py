"""OSDP on nodes of GPUs that are not here, simulated: Llama-like models beside what people choose by hand.

.. code-block:: bash

    python benchmarks/cluster.py
    python benchmarks/cluster.py --quick true

Nothing is trained. Models are profiled on the meta device by the rates of the GPUs, plans are searched as in training,
and every contestant divides the same global batch into its best micro-batches under the limit. Beside it stands how far
the simulator was off where steps were measured. Every case is written as soon as it is there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.section import PICTURES, RESULTS, kept_in, measured, wide_console
from benchmarks.measures.simulated import levels, nodes, predictions

MEASURED = tuple(RESULTS / f"{name}.json" for name in ("headline", "activations", "accumulation"))
"""Files of benchmarks that have predicted and measured steps."""


def main(
    output: Path | None = None, pictures: Path | None = PICTURES, quick: bool = False, fresh: bool = False
) -> None:
    """Simulates every case, prints tables, and writes JSON.

    Args:
        output: JSON file; cases that it has already are not simulated again. null: the one beside this program, or none
            if quick.
        pictures: Folder of the picture, which needs matplotlib; null for none. None is drawn if quick.
        quick: Whether to go through all of it with a tiny model.
        fresh: Whether to simulate again what the file has.
    """
    with kept_in(output, "cluster", quick=quick) as results:
        measured(nodes.section(nodes.quick_cases() if quick else nodes.cases()), results, is_fresh=fresh)
        if not quick:
            measured(levels.section(levels.CASES), results, is_fresh=fresh)
        wide_console().print(predictions.table(MEASURED))
        if pictures is not None and not quick:
            from benchmarks.pictures.cluster import draw, draw_memory

            draw(results.stored("nodes"), pictures / "cluster_nodes.svg")
            draw_memory(*nodes.memory_over_step(nodes.SHOWN), nodes.SHOWN, pictures / "cluster_memory.svg")


if __name__ == "__main__":
    auto_cli(main)
