"""OSDP's plans against what people use instead, each at its best in the same memory, on links of a chosen rate.

.. code-block:: bash

    python benchmarks/contest.py headline
    python benchmarks/contest.py nodes --sections '[global]' --num_rounds 3
    python benchmarks/contest.py splitting --quick true

Contests are rows of `benchmarks/measures/beside_fsdp/cases.py`. Peaks are counted first, then all take steps in turns.
The one of races has sections of another kind, too: links that change in mid-training, and batches of many lengths. The
one of hosts trains on one emulated device, whose computing is a sleep.
Every case is written as soon as it is measured: a run that was killed goes on where it was.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.beside_fsdp import changed_links, host, lengths
from benchmarks.measures.beside_fsdp.baselines import counted
from benchmarks.measures.beside_fsdp.cases import CONTESTS, Contest, Host, Lengths, quick_sections
from benchmarks.measures.beside_fsdp.contest import section
from benchmarks.measures.section import PICTURES, Section, kept_in, measured


def main(
    name: str,
    sections: list[str] | None = None,
    *,
    output: Path | None = None,
    pictures: Path | None = PICTURES,
    num_rounds: int = 6,
    quick: bool = False,
    fresh: bool = False,
) -> None:
    """Counts what the others take, measures sections, prints tables and targets, and writes JSON.

    Args:
        name: The contest: accumulation, activations, headline, host, lora, nodes, race, splitting or stationary.
        sections: What to measure of it; null for all.
        output: JSON file; cases that it has already are not measured again. null: the one of this name beside the
            others, or none if quick.
        pictures: Folder of the pictures, which need matplotlib; null for none. None are drawn if quick.
        num_rounds: timed steps of each that takes part; the fastest counts. (The first few
            take longer where much memory is gathered and freed.)
        quick: Whether to go through all of it with a tiny model, few rivals and links that are not shaped. Sections
            that are one and the same then are measured once.
        fresh: Whether to measure again what the file has.
    """
    if name not in CONTESTS:
        raise SystemExit(f"Expected one of {', '.join(CONTESTS)}, got {name!r}.")
    contests = quick_sections(CONTESTS[name]) if quick else CONTESTS[name]
    chosen = [*contests] if sections is None else sections
    unknown = [each for each in chosen if each not in contests]
    if unknown:
        raise SystemExit(f"Expected sections of {name} among {', '.join(contests)}, got {', '.join(unknown)}.")
    torch.set_num_threads(1)  # threads on small tensors wait for each other: counting has taken ten times as long
    rivalries = {each: contest for each, contest in contests.items() if isinstance(contest, Contest)}
    with kept_in(output, name, quick=quick) as results:
        have_rivals = any(each in rivalries for each in chosen)
        baselines = counted([*rivalries.values()] if have_rivals else [], results, is_fresh=fresh)

        def asked(each: str) -> Section:
            contest = contests[each]
            if isinstance(contest, Contest):
                return section(each, contest, baselines, num_rounds=num_rounds)
            if isinstance(contest, Lengths):
                return lengths.section(each, contest, num_rounds=num_rounds)
            if isinstance(contest, Host):
                return host.section(each, contest, num_rounds=num_rounds)
            return changed_links.section(each, contest)

        for each in chosen:
            if each not in rivalries or rivalries[each].rates_mbit:
                measured(asked(each), results, is_fresh=fresh)
        if pictures is not None and not quick:
            from benchmarks.pictures.contest import draw  # matplotlib is not needed for measuring

            for each, contest in rivalries.items():
                draw(results.stored(each), contest, pictures, f"{name}_{each}")


if __name__ == "__main__":
    auto_cli(main)
