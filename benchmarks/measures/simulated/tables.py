"""What simulated samples/s amount to: ratios, beside those that the paper claims, and where nothing is gained."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from rich.table import Table

from benchmarks.measures.section import Row
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import three_digits

FSDP = (
    "FULL_SHARD, a unit for each block",
    "FULL_SHARD, a unit for each Linear",
    "SHARD_GRAD_OP, a unit for each block",
    "FULL_SHARD, a unit for each block, checkpointed",
    "FULL_SHARD, a unit for each Linear, checkpointed",
    "SHARD_GRAD_OP, a unit for each block, checkpointed",
)
OSDP = ("OSDP", "OSDP, splitting", "OSDP, splitting and activations")
BASELINES = {OSDP[0]: FSDP[:3], OSDP[1]: FSDP[:3], OSDP[2]: FSDP}
"""What does no more than OSDP may do."""
SHARDED = {OSDP[0]: FSDP[:2], OSDP[1]: FSDP[:2], OSDP[2]: FSDP[3:5]}
"""FULL_SHARD as torch is best in, and as the paper has it."""

NARROW, WIDE, CHANGING = "narrow and deep", "wide and shallow", "of changing width"
PAPERS = (
    (OSDP[0], (NARROW,), 1.18, 1.172),
    (OSDP[0], (CHANGING,), 1.16, 1.10),
    (OSDP[1], (NARROW,), 1.23, 1.22),
    (OSDP[1], (WIDE,), 1.92, 1.50),
    (OSDP[1], (CHANGING,), 1.33, 1.24),
    (OSDP[2], (NARROW, WIDE, CHANGING), 2.08, 1.529),
)
"""Samples/s over FSDP that the paper measured: of what, in which families, at best and on average."""
NOTHING = 1.02
"""Ratios below this are nothing that a simulation could tell."""


def of(row: Row, name: str) -> Row | None:
    """One that took part; None where not even one sample fits."""
    found: Row | None = next((each for each in row["entrants"] if each["name"] == name), None)
    return found


def over(row: Row, name: str, baseline: str) -> float | None:
    """Samples/s over a baseline's; None where one of them does not fit."""
    own, other = of(row, name), of(row, baseline)
    return None if own is None or other is None else float(own["samples_per_s"] / other["samples_per_s"])


def best(row: Row, names: Sequence[str]) -> Row | None:
    """The fastest of some; None where none of them fits."""
    return max((each for each in row["entrants"] if each["name"] in names), key=_samples_per_s, default=None)


def over_best(row: Row, name: str) -> float | None:
    """Samples/s over those of the fastest of the `BASELINES`: 0 where only these fit, None where none of them does."""
    own, baseline = of(row, name), best(row, BASELINES[name])
    return None if baseline is None else 0.0 if own is None else float(own["samples_per_s"] / baseline["samples_per_s"])


def where(row: Row) -> tuple[str, str, str]:
    """Machine, model and limit."""
    case = row["case"]
    return case["machine"]["name"], case["model"]["layers"], f"{case['limit_gib']:g} GiB"


def details(rows: Sequence[Row]) -> Table:
    """One line for each that took part."""
    drawn = Table("machine", "model", "limit", "who", title="Simulated: everybody at its best micro-batch")
    for column in ("micro-batch", "samples/s", "step", "computing", "waiting", "overhead", "peak"):
        drawn.add_column(column, justify="right")
    drawn.add_column("plan")
    for row in rows:
        for name in (*FSDP, *OSDP):
            entrant = of(row, name)
            if entrant is None:
                drawn.add_row(*where(row), name, "does not fit")
                continue
            drawn.add_row(
                *where(row),
                name,
                str(entrant["micro_batch_size"]),
                three_digits(entrant["samples_per_s"]),
                f"{entrant['predicted_s']:.2f} s",
                *(f"{entrant[part] / entrant['predicted_s']:.0%}" for part in ("compute_s", "exposed_s", "overhead_s")),
                format_bytes(entrant["predicted_bytes"]),
                entrant["plan"],
            )
        drawn.add_section()
    return drawn


def ratios(rows: Sequence[Row]) -> Table:
    """OSDP's samples/s over FULL_SHARD's, and over the best FSDP's, by case."""
    drawn = Table("machine", "model", "limit", "who", title="Simulated: samples/s over FSDP's, each at its best")
    for column in ("over FULL_SHARD, by block", "by Linear", "over the best FSDP"):
        drawn.add_column(column, justify="right")
    for row in rows:
        for name in OSDP:
            baselines = [*(of(row, baseline) for baseline in SHARDED[name]), best(row, BASELINES[name])]
            drawn.add_row(*where(row), name, *(_times(of(row, name), baseline) for baseline in baselines))
        drawn.add_section()
    return drawn


def beside_papers(rows: Sequence[Row]) -> Table:
    """By family: at best and on average of the cases in which FULL_SHARD fits, beside the paper's."""
    drawn = Table("who", "family", title="On the paper's machine: samples/s over FULL_SHARD, at best / on average")
    for column in ("paper, measured", "simulated, over units by block", "simulated, over units by Linear"):
        drawn.add_column(column, justify="right")
    for name, families, most, average in PAPERS:
        cells = []
        for baseline in SHARDED[name]:
            chosen = [row for row in rows if row["case"]["model"]["family"] in families]
            found = [ratio for row in chosen if (ratio := over(row, name, baseline)) is not None]
            cells.append(f"{max(found):.2f} / {mean(found):.2f} ({len(found)})" if found else "does not fit")
        drawn.add_row(name, ", ".join(families), f"{most:.2f} / {average:.2f}", *cells)
    return drawn


def remarks(rows: Sequence[Row]) -> list[str]:
    """Where OSDP gains nothing, and where only OSDP trains at all."""
    lines = []
    for row in rows:
        place, fsdp, osdp = ", ".join(where(row)), best(row, FSDP), best(row, OSDP)
        if osdp is None:
            lines.append(f"{place}: nobody fits.")
        elif fsdp is None:
            lines.append(f"{place}: no FSDP fits; {osdp['name']} trains.")
        elif (ratio := osdp["samples_per_s"] / fsdp["samples_per_s"]) < NOTHING:
            waits = fsdp["exposed_s"] / fsdp["predicted_s"]
            lines.append(
                f"{place}: OSDP gains nothing ({ratio:.3f} of {fsdp['name']}, micro-batch {fsdp['micro_batch_size']},"
                f" which waits for communication in {waits:.1%} of its step)."
            )
    return lines


def _samples_per_s(entrant: Row) -> float:
    found: float = entrant["samples_per_s"]
    return found


def _times(own: Row | None, baseline: Row | None) -> str:
    if own is None:
        return "does not fit"
    return "baseline does not fit" if baseline is None else f"{own['samples_per_s'] / baseline['samples_per_s']:.2f}x"
