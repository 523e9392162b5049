"""Llama-like models whose blocks have to recompute, simulated: OSDP with levels, with whole blocks, and by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.measures.section import Row, Section, Target
from benchmarks.measures.simulated import published
from lightning_osdp import InfeasibleError, Machine, Plan, SearchSpace, make_plan, simulate
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds

WHOLE = "OSDP, whole blocks"
SPACES = {
    "OSDP": SearchSpace(activations=published.PROFILED),
    WHOLE: SearchSpace(activations=("keep", "recompute")),
}
BY_HAND = ("none", "every second block", "full", "by operation")
"""Checkpointing of `published.Case`: a unit for each block, resharded after forward but for the last."""
_APART = ("waiting", "contention", "overhead")
"""Parts of a step that the roofline leaves out."""
_OF_ROOFLINE, _AS_GOOD = 0.8, 0.999
_CLAIMED = 1.005
"""Most that levels may be said to gain where links bind."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine, with one sample of so many tokens on each GPU."""

    model: str
    """Name of a model of ``published.toml``."""
    machine: str
    sequence: int
    roofline: float
    """Samples/s of levels over whole blocks by a roofline of one GPU, without communication; 1: links bind."""

    def __str__(self) -> str:
        """Text of the case in a line of progress."""
        return f"{self.model} on {self.machine}, {self.sequence} tokens"


CASES = (
    Case(model="llama31_70b", machine="4x8 h100-sxm, 8x400gbit", sequence=4096, roofline=1.039),
    Case(model="llama31_70b", machine="16x8 h100-sxm, 8x400gbit", sequence=4096, roofline=1.092),
    Case(model="llama31_8b", machine="8 h100-sxm", sequence=12288, roofline=1.074),
    Case(model="llama31_8b", machine="8 h100-sxm", sequence=16384, roofline=1.087),
    Case(model="llama31_70b", machine="4x8 h100-sxm, 8x400gbit", sequence=8192, roofline=1.017),
    Case(model="llama31_8b", machine="8 a100-80", sequence=12288, roofline=1.080),
    Case(model="llama31_8b", machine="8 a100-80", sequence=16384, roofline=1.087),
    Case(model="llama31_8b", machine="8 rtx-4090", sequence=1024, roofline=1.0),
    Case(model="llama31_70b", machine="4x8 h100-sxm, 400gbit", sequence=4096, roofline=1.0),
)
"""Rooflines take 55% of the peak for products, 78 GB for tensors of an H100's or A100's 80, and norms of one kernel."""


def section(chosen: Sequence[Case]) -> Section:
    """Section of these cases."""
    return Section(name="levels", cases=chosen, measure=measure, table=table, targets=targets)


def measure(case: Case) -> dict[str, Any]:
    """Predicts OSDP's plans with and without levels, and what people choose by hand, of those that fit."""
    machine = Machine.parse(case.machine)
    limit_bytes, found = machine.memory_bytes, {}
    profile = published.profile_of(case.model, case.sequence, case.machine)
    for name, space in SPACES.items():
        try:
            plan = make_plan(
                profile, machine.cluster, memory_limit_bytes=limit_bytes, micro_batch_size=1, search_space=space
            )
        except InfeasibleError:
            continue
        step = simulate(plan, profile, machine.cluster)
        found[name] = {
            "step_s": step.time_s,
            "waiting_s": step.exposed_communication_s,
            "contention_s": step.contention_s,
            "overhead_s": step.overhead_s,
            "peak_bytes": plan.peak_bytes,
            "blocks": _told(plan),
            "gap": plan.gap,
        }
    for checkpointing in BY_HAND:
        way = published.Case(
            set="",
            model=case.model,
            machine=case.machine,
            sequence=case.sequence,
            batch=1,
            checkpointing=checkpointing,
        )
        numbers = published.measure(way)
        if numbers["live_gib"] * 2**30 <= limit_bytes:
            found[f"by hand, checkpointing {checkpointing}"] = {
                "step_s": numbers["step_s"],
                "peak_bytes": round(numbers["live_gib"] * 2**30),
            }
    return {"limit_bytes": limit_bytes, "found": found}


def _told(plan: Plan) -> str:
    numbers = Counter(f"{block.activations}, {len(block.kept)} kept" for block in plan.blocks)
    return "; ".join(f"{number} {name}" for name, number in sorted(numbers.items()))


def table(rows: Sequence[Row]) -> Table:
    """One line for each that fits."""
    drawn = Table("model", "machine", "tokens", "who", title="Simulated: one sample on each GPU")
    for column in ("step", "OSDP over it", "roofline", *_APART, "gap", "peak"):
        drawn.add_column(column, justify="right")
    drawn.add_column("blocks")
    for row in rows:
        case = row["case"]
        for name, each in row["found"].items():
            gained = _ratio(row, name)
            drawn.add_row(
                case["model"],
                case["machine"],
                str(case["sequence"]),
                name,
                format_seconds(each["step_s"]),
                "" if gained is None else f"{gained:.3f}",
                f"{case['roofline']:.3f}" if name == WHOLE else "",
                *(f"{each[f'{part}_s'] / each['step_s']:.1%}" if f"{part}_s" in each else "" for part in _APART),
                f"{each['gap']:.1%}" if "gap" in each else "",
                format_bytes(each["peak_bytes"]),
                each.get("blocks", ""),
            )
        drawn.add_section()
    return drawn


def _ratio(row: Row, other: str) -> float | None:
    """Samples/s of OSDP over those of another; None where one of them does not fit."""
    found = row["found"]
    return found[other]["step_s"] / found["OSDP"]["step_s"] if other in found and "OSDP" in found else None


def targets(rows: Sequence[Row]) -> list[Target]:
    """A part of what the roofline says, nothing where links bind, and nowhere less than the best by hand."""
    return [target for row in rows for target in _targets(row)]


def _targets(row: Row) -> Iterator[Target]:
    where, roofline, gained = str(Case(**row["case"])), row["case"]["roofline"], _ratio(row, WHOLE)
    if gained is not None and roofline > 1:
        gain = (gained - 1) / (roofline - 1)
        yield Target(name=f"{where}: part of the roofline's gain", limit=_OF_ROOFLINE, measured=gain, is_least=True)
    elif gained is not None:
        yield Target(name=f"{where}: gain that is claimed though links bind", limit=_CLAIMED, measured=gained)
    ratios = [_ratio(row, name) for name in row["found"] if name != "OSDP"]
    least = min((each for each in ratios if each is not None), default=None)
    if least is not None:
        yield Target(name=f"{where}: least over others", limit=_AS_GOOD, measured=least, is_least=True)
