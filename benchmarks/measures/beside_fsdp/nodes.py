"""Nodes with links between them: what takes part, what the links do, and what OSDP's plans are to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from benchmarks.measures.beside_fsdp import baselines, contest
from benchmarks.measures.beside_fsdp.headline import CHECKPOINTING, DDP, Sizes, of_each
from benchmarks.measures.links import on_links_that_can_be_had, on_ranks, rate_of
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Baseline, Sharding, Way
from lightning_osdp.core.modes import MODES
from lightning_osdp.core.text.byte_size import format_bytes

LIMITS = (1.15, 1.5, 2.0)
"""Factors of the counted peak of `baselines.BASE` with micro-batches of one sample."""
NODE_SIZE = 2
LINK_MBIT = 1000.0
"""Where bytes are counted: they are the same at any rate."""
_SHARDINGS: tuple[Sharding, ...] = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "hpZ")
HYBRID, HYBRID_ZERO2, HPZ = (Way(sharding=each) for each in _SHARDINGS[2:])
HYBRID_CHECKPOINTING = Way(sharding="HYBRID_SHARD", recomputes=True)
WAYS = (
    baselines.BASE,
    CHECKPOINTING,
    *(Way(sharding=each, recomputes=recomputes) for each in _SHARDINGS for recomputes in (False, True)),
    DDP,
)
"""Whom OSDP is compared with: `baselines.BASE` and its like reduce in every micro-batch, all others in the last."""
OVER_ALL = "OSDP, sharded over all ranks"
SPACES: contest.Spaces = {OVER_ALL: {"modes": [*MODES, HPZ.sharding]}, "OSDP": {}}
SENT = 0.05
"""How far the bytes that a node sends may be from the closed forms, headers included."""
_LEAST_SENT = 2**20
"""Of fewer bytes, headers and what ranks agree on before collectives are a good part."""


@dataclass(frozen=True, kw_only=True)
class LinkCase:
    """All-reduces inside of nodes, and between them."""

    num_ranks: int
    node_size: int
    rate_mbit: float
    """10^6 bit/s that a node may send."""
    num_bytes: int
    """Of each rank."""


def links_section(sizes: Sizes, *, num_bytes: int = 8 * 2**20) -> Section:
    """Whether ranks of a node reach each other without its link, and other nodes through it alone."""
    assert sizes.node_size is not None
    cases = [
        LinkCase(num_ranks=sizes.num_ranks, node_size=sizes.node_size, rate_mbit=rate_mbit, num_bytes=num_bytes)
        for rate_mbit in dict.fromkeys((LINK_MBIT, *sizes.rates_mbit))
        if rate_mbit is not None
    ]
    return Section(
        name="links",
        cases=on_links_that_can_be_had(cases),
        measure=_measure_links,
        table=links_table,
        targets=links_targets,
    )


def _measure_links(case: LinkCase) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(
        case.num_ranks,
        case.rate_mbit,
        "benchmarks.measures.links:time_all_reduces",
        ranks_per_host=case.node_size,
        node_size=case.node_size,
        num_bytes=case.num_bytes,
    )
    return found


def _sent_between(case: Mapping[str, Any]) -> float:
    """Bytes that the ranks of a node send in all-reduces between nodes, in a ring there and back."""
    times = 2 * (1 - case["node_size"] / case["num_ranks"])
    found: float = case["node_size"] * times * case["num_bytes"]
    return found


def links_table(rows: Sequence[Row]) -> Table:
    """One line for each kind of all-reduce."""
    drawn = Table("links", "all-reduce", title="All-reduces inside of nodes and between them, of all ranks at a time")
    for column in ("of each rank", "seconds", "a node sends", "closed form", "at the rate of the link"):
        drawn.add_column(column, justify="right")
    for row in rows:
        for name, sent in (("within", 0.0), ("between", _sent_between(row["case"]))):
            drawn.add_row(
                rate_of(row),
                name,
                format_bytes(row["case"]["num_bytes"]),
                f"{row[name]['seconds']:.3f} s",
                format_bytes(row[name]["sent_bytes"]),
                format_bytes(sent),
                f"{sent * 8 / (row['case']['rate_mbit'] * 1e6):.3f} s",
            )
    return drawn


def links_targets(rows: Sequence[Row]) -> list[Target]:
    """What ranks of a node send each other is not on its link; what nodes send each other is, and takes its time."""
    found = []
    for row in rows:
        sent, within, between = _sent_between(row["case"]), row["within"], row["between"]
        rate, least_s = rate_of(row), sent * 8 / (row["case"]["rate_mbit"] * 1e6)
        found += [
            Target(
                name=f"{rate}: inside of nodes, on the link of what is sent",
                limit=SENT,
                measured=within["sent_bytes"] / row["case"]["num_bytes"],
            ),
            Target(
                name=f"{rate}: between nodes, bytes are off by",
                limit=SENT,
                measured=abs(between["sent_bytes"] / sent - 1),
            ),
            Target(
                name=f"{rate}: between nodes, seconds over those at the rate of the link",
                limit=1 - SENT,
                measured=between["seconds"] / least_s,
                is_least=True,
            ),
        ]
    return found


def bytes_section(sizes: Sizes, known: Mapping[str, Sequence[Baseline]]) -> Section:
    """What a node sends in a step of everybody, with several micro-batches."""
    (first, *_) = sizes.models
    cases = [
        contest.Case(
            model=first,
            num_ranks=sizes.num_ranks,
            node_size=sizes.node_size,
            rate_mbit=LINK_MBIT,
            division="held",
            limits=(None,),
            micro_batch_size=1,
            num_micro_batches=sizes.samples_per_step,
            num_rounds=1,
        )
    ]
    section = contest.section("bytes", cases, known, spaces={}, targets=sent_targets)
    return replace(section, table=bytes_table)


def bytes_table(rows: Sequence[Row]) -> Table:
    """One line for each that took part; S is all of the model's parameters."""
    drawn = Table("who", "K", title="Bytes that a node sends to others in a step, over those of all parameters")
    for column in ("S", "sent", "closed form"):
        drawn.add_column(column, justify="right")
    for row in rows:
        for entrant in row["entrants"]:
            whole = entrant["parameter_bytes"]
            drawn.add_row(
                entrant["name"],
                str(entrant["num_micro_batches"]),
                format_bytes(whole),
                f"{entrant['sent_bytes'] / whole:.3f}",
                f"{entrant['wire_bytes'] / whole:.3f}",
            )
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """What holds in every cell: memory, the best of the others, the prediction, and bytes between nodes."""
    return of_each(rows) + sent_targets(rows)


def sent_targets(rows: Sequence[Row]) -> list[Target]:
    """Bytes that a node sends, where links are shaped; the worst of each row."""
    found = []
    for row in rows:
        case = row["case"]
        if case["rate_mbit"] is not None:
            off, name = max(
                (abs(each["sent_bytes"] / each["wire_bytes"] - 1), each["name"]) for each in row["entrants"]
            )
            where = f"{case['model']}, {rate_of(row)}, {case['num_micro_batches']} micro-batches, {name}"
            found.append(Target(name=f"{where}: bytes sent are off by", limit=SENT, measured=off))
    return found
