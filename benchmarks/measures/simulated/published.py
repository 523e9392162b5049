"""Predicted beside published: memory and throughput that others measured on GPUs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch.optim import AdamW

from benchmarks.measures.section import Row, Section, Target
from benchmarks.measures.simulated.models import LanguageModel, Sizes
from lightning_osdp import ComputePrecision, Machine, ModelProfile, TrainingStep, profile_model
from lightning_osdp.assign import Setting
from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.scheduler.by_hand import in_blocks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HERE = Path(__file__).parent
_GIB = 2**30
MEMORY_MEDIAN, MEMORY_WORST = 0.05, 0.10
SPEED_MEDIAN, SPEED_WORST = 0.10, 0.20
RESHARDING = 0.25
"""How far the difference between always and never resharding may be off, of the published one."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One published row."""

    set: str
    model: str
    machine: str
    """As `Machine.parse` reads it; ``@`` is the device of ``h100_96.toml``."""
    sequence: int
    batch: int
    """Samples of one GPU, in one micro-batch."""
    checkpointing: str
    """``none``, ``full``, ``every second block``, or ``by operation``, as torchtitan chooses operations."""
    reshard: str = "default"
    """``always``, ``never``, or ``default``: all blocks but the last."""
    gib: float | None = None
    tokens_per_s: float | None = None
    does_not_fit: bool = False
    calibrates: bool = False


def cases() -> list[Case]:
    """All rows of ``published.toml``."""
    return [
        Case(set=name, **{**each["common"], **row})
        for name, each in _document()["sets"].items()
        for row in each["rows"]
    ]


@cache
def _document() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((_HERE / "published.toml").read_text(encoding="utf-8"))
    return found


def section(chosen: Sequence[Case]) -> Section:
    """These rows, predicted."""
    return Section(name="published", cases=chosen, measure=measure, table=table, targets=targets)


def measure(case: Case) -> dict[str, Any]:
    """The peak and the throughput of a row as `fully_shard` would have them, with a unit for each block.

    Tables of llm-foundry were measured with FSDP1, of which gathering and computing overlap likewise.
    """
    spec = case.machine.replace("@", str(_HERE / "h100_96.toml"))
    machine = Machine.parse(spec)
    # of one device, whose rates are those of all
    profile = _profile(
        case.model,
        case.sequence,
        re.sub(r".*\d ([^ ,]+)(,.*)?", r"\1", spec),
        by_operation=case.checkpointing == "by operation",
    )
    setting = _setting(case, profile, machine)
    last = max(index for index, unit in enumerate(setting.units) if not unit.is_root)
    kept = {"always": (), "default": (last,), "never": range(len(setting.units))}[case.reshard]
    modes = tuple(DP if unit.is_root or index in kept else ZDP for index, unit in enumerate(setting.units))
    step_s, peak = setting.costs.step_time_s(modes), setting.costs.exact_peak(modes)
    return {
        "predicted_gib": peak.peak_bytes / _GIB,
        "device_gib": machine.device.memory_mib / 1024,
        "predicted_tokens_per_s": case.batch * case.sequence / step_s,
        "compute_s": setting.costs.compute_s,
        "step_s": step_s,
        "peak": {"phase": peak.phase, **{name: size / _GIB for name, size in peak.parts.items() if size}},
    }


def _setting(case: Case, profile: ModelProfile, machine: Machine) -> Setting:
    setting = in_blocks(profile, machine.cluster).at(case.batch)
    names = [block.name for block in profile.blocks]
    chosen = {"full": names, "every second block": names[1::2]}.get(case.checkpointing, [])
    return setting.with_blocks(dict.fromkeys(chosen, "recompute"))


@cache
def _profile(model: str, sequence: int, spec: str, *, by_operation: bool) -> ModelProfile:
    """Of two samples; parameters are gathered in bfloat16, and gradients reduced in float32."""
    with torch.device("meta"):
        module = LanguageModel(Sizes(**_document()["models"][model]), sequence=sequence, by_operation=by_operation)
    tokens = torch.zeros(2, sequence, dtype=torch.long)
    step = TrainingStep(
        module,
        lambda module: [AdamW(module.parameters())],
        ComputePrecision(torch.bfloat16, reduce_dtype=torch.float32),
    )
    activations = ("keep",) if by_operation else ("keep", "recompute")
    return profile_model(
        module, (tokens, tokens.clone()), step, rates=Machine.parse(spec).rates, activations=activations
    )


def table(rows: Sequence[Row]) -> Table:
    """One line for each row."""
    drawn = Table("set", "model", "machine", "checkpointing", "resharded", title="Predicted and published")
    for column in ("GiB", "predicted", "tokens/s", "predicted", "after calibration"):
        drawn.add_column(column, justify="right")
    for row in rows:
        case = row["case"]
        factor = _factor(rows, case["set"])
        drawn.add_row(
            case["set"],
            case["model"],
            case["machine"],
            case["checkpointing"],
            case["reshard"],
            _number(case["gib"]) or ("does not fit" if case["does_not_fit"] else ""),
            _number(row["predicted_gib"]),
            _number(case["tokens_per_s"], 0),
            _number(row["predicted_tokens_per_s"], 0),
            _number(row["predicted_tokens_per_s"] * factor, 0) if factor else "",
        )
    return drawn


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _factor(rows: Sequence[Row], name: str) -> float | None:
    """Published over predicted throughput of the row that calibrates a set; None where there is none."""
    for row in rows:
        case = row["case"]
        if case["set"] == name and case["calibrates"] and case["tokens_per_s"]:
            return float(case["tokens_per_s"] / row["predicted_tokens_per_s"])
    return None


def calibrated(rows: Sequence[Row], row: Row) -> float:
    """Predicted tokens/s of a row after its set was calibrated."""
    return float(row["predicted_tokens_per_s"] * (_factor(rows, row["case"]["set"]) or 1.0))


def speed_errors(rows: Sequence[Row], sets: Sequence[str]) -> list[float]:
    """Relative errors of throughput after calibration, of the rows that do not calibrate."""
    found = []
    for row in rows:
        case, factor = row["case"], _factor(rows, row["case"]["set"])
        if case["set"] in sets and case["tokens_per_s"] and not case["calibrates"] and factor:
            found.append(row["predicted_tokens_per_s"] * factor / case["tokens_per_s"] - 1)
    return found


def memory_errors(rows: Sequence[Row]) -> list[float]:
    """Errors of memory over what was published: of differences to the row that calibrates a set.

    What a set's rows have in common, such as the activations of checkpointing by operation, cancels out.
    """
    found = []
    for first in (row for row in rows if row["case"]["calibrates"] and row["case"]["gib"]):
        for row in rows:
            case = row["case"]
            if case["set"] == first["case"]["set"] and case["gib"] and not case["calibrates"]:
                predicted = row["predicted_gib"] - first["predicted_gib"]
                published = case["gib"] - first["case"]["gib"]
                found.append((predicted - published) / case["gib"])
    return found


def targets(rows: Sequence[Row]) -> list[Target]:
    """What was wanted of them."""
    return [*_targets(rows)]


def _targets(rows: Sequence[Row]) -> Iterator[Target]:
    memory = [abs(error) for error in memory_errors(rows)]
    if memory:
        yield Target(
            name="memory, differences within a set: median error", limit=MEMORY_MEDIAN, measured=median(memory)
        )
        yield Target(name="memory, differences within a set: worst error", limit=MEMORY_WORST, measured=max(memory))
    speed = [abs(error) for error in speed_errors(rows, ("B", "E"))]
    if speed:
        yield Target(name="tokens/s of B and E: median error", limit=SPEED_MEDIAN, measured=median(speed))
        yield Target(name="tokens/s of B and E: worst error", limit=SPEED_WORST, measured=max(speed))
    for name in ("G7", "G3"):
        slope = [abs(error) for error in speed_errors(rows, (name,))]
        if slope:
            yield Target(name=f"tokens/s of {name} over ranks: worst error", limit=SPEED_WORST, measured=max(slope))
    resharding = {row["case"]["reshard"]: row for row in rows if row["case"]["set"] == "A"}
    if {"always", "never"} <= resharding.keys():
        always, never = resharding["always"], resharding["never"]
        for what, predicted, published in (
            ("GiB", never["predicted_gib"] - always["predicted_gib"], never["case"]["gib"] - always["case"]["gib"]),
            (
                "tokens/s",
                never["predicted_tokens_per_s"] / always["predicted_tokens_per_s"] - 1,
                never["case"]["tokens_per_s"] / always["case"]["tokens_per_s"] - 1,
            ),
        ):
            off = abs(predicted / published - 1)
            yield Target(name=f"A, from always to never resharding: {what} off by", limit=RESHARDING, measured=off)
    for row in rows:
        case = row["case"]
        if case["does_not_fit"] or case["tokens_per_s"]:
            fits = row["predicted_gib"] <= row["device_gib"]
            name = f"{case['set']}, {case['model']}, checkpointing {case['checkpointing']}: wrong whether it fits"
            yield Target(name=name, limit=1, measured=float(fits == case["does_not_fit"]))
