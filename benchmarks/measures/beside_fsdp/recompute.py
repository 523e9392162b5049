"""Samples/s where blocks recompute: OSDP's plans over ``fully_shard`` with checkpointing, in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.families import build
from benchmarks.measures.beside_fsdp.baselines import BASE
from benchmarks.measures.beside_fsdp.contest import BEYOND_LIMIT, counted_bytes
from benchmarks.measures.links import on_links_that_can_be_had, on_ranks, rate_of
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.beside_fsdp.recompute import BY_BLOCK, EVERYWHERE, FSDP, PAPERS_FSDP
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes

MODELS = ("12 x 256", "3 x 1024", "256 to 768")
"""Narrow and deep, wide and shallow, and of changing width."""
SHARE = 0.95
"""Of what FSDP without checkpointing is counted to need."""
TO_REACH = {FSDP: 1.25, PAPERS_FSDP: 1.5}
"""OSDP's samples/s, block by block, over those of each, at `TO_REACH_MBIT`."""
TO_REACH_MBIT = 200.0
OF_EVERYWHERE = 0.97
"""Its samples/s at least, over those of OSDP with all blocks recomputing."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on links of one rate."""

    model: str
    num_ranks: int
    rate_mbit: float | None
    """10^6 bit/s; None: not shaped."""
    micro_batch_size: int
    num_rounds: int


def section(cases: Sequence[Case]) -> Section:
    """Cases whose links can be had here."""
    return Section(
        name="recompute",
        cases=on_links_that_can_be_had(cases),
        measure=measure,
        table=table,
        targets=targets,
    )


def measure(case: Case) -> dict[str, Any]:
    """What FSDP needs, counted; steps of all that take part, interleaved; and their peaks, counted."""
    sizes = {"world_size": case.num_ranks, "micro_batch_size": case.micro_batch_size}
    needed_bytes = counted_bytes(case.model, BASE.plan(build(case.model), **sizes).to_json())
    found = on_ranks(
        case.num_ranks,
        case.rate_mbit,
        "benchmarks.testbed.beside_fsdp.recompute:on_one_rank",
        model=case.model,
        limit_bytes=round(SHARE * needed_bytes),
        micro_batch_size=case.micro_batch_size,
        num_rounds=case.num_rounds,
    )
    entrants = []
    for fields in found["entrants"]:
        plan = Plan.from_json(fields["plan"])
        modes = [mode for unit in plan.units if unit.name for mode in unit.modes]
        did = f"{modes.count('DP')} of {len(modes)} kept gathered, {len(plan.blocks)} blocks recompute"
        entrants.append({**fields, "plan": did, "counted_bytes": counted_bytes(case.model, fields["plan"])})
    return {"needed_bytes": needed_bytes, "bound_s": found["bound_s"], "entrants": entrants}


def table(rows: Sequence[Row]) -> Table:
    """One line for each that took part."""
    title = f"Blocks that recompute, in {SHARE:g} of what FSDP without checkpointing needs: samples/s over FSDP"
    drawn = Table("model", "links", "who", "plan", title=title)
    for column in ("peak counted", "predicted", "step", "predicted", "over FSDP", "predicted", "bound"):
        drawn.add_column(column, justify="right")
    for row in rows:
        base = of(row, FSDP)
        for entrant in row["entrants"]:
            drawn.add_row(
                row["case"]["model"],
                rate_of(row),
                entrant["name"],
                entrant["plan"],
                format_bytes(entrant["counted_bytes"]),
                f"{entrant['predicted_bytes'] / entrant['counted_bytes'] - 1:+.2%}",
                f"{entrant['measured_s']:.2f} s",
                f"{entrant['predicted_s']:.2f} s",
                *(f"{base[which] / entrant[which]:.2f}x" for which in ("measured_s", "predicted_s")),
                f"{base['predicted_s'] / row['bound_s']:.2f}x",
            )
    return drawn


def of(row: Row, name: str) -> Row:
    """One that took part."""
    found: Row = next(each for each in row["entrants"] if each["name"] == name)
    return found


def targets(rows: Sequence[Row]) -> list[Target]:
    """What to reach over FSDP's two orders and over recomputing everywhere, and what not to take."""
    found = []
    for row in rows:
        case, osdp = row["case"], of(row, BY_BLOCK)
        rate = case["rate_mbit"]
        where = f"{case['model']}, {rate_of(row)}"
        over = osdp["counted_bytes"] / (SHARE * row["needed_bytes"])
        found.append(Target(name=f"{where}: bytes of the limit", limit=BEYOND_LIMIT, measured=over))
        if rate is None:
            continue
        to_reach = {EVERYWHERE: OF_EVERYWHERE, **(TO_REACH if rate == TO_REACH_MBIT else {})}
        for name, limit in to_reach.items():
            ratio = of(row, name)["measured_s"] / osdp["measured_s"]
            found.append(Target(name=f"{where}: over {name}", limit=limit, measured=ratio, is_least=True))
    return found
