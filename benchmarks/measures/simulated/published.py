"""Predicted beside published: memory and throughput that others measured on GPUs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch.optim import AdamW

from benchmarks.measures.section import Row, Section, Target
from benchmarks.measures.simulated.allocator import reserved
from benchmarks.measures.simulated.models import Sizes, made
from lightning_osdp import ComputePrecision, Machine, ModelProfile, TrainingStep, profile_model
from lightning_osdp.core.axes import DP, HDP, HSDP, ZDP, Treatment, freed_and_kept
from lightning_osdp.core.cluster import CUDA_HEADROOM
from lightning_osdp.core.step import Workload
from lightning_osdp.core.units import grouped
from lightning_osdp.machines import PUBLISHED_RATES
from lightning_osdp.planner.assign import Setting
from lightning_osdp.planner.engine import FSDP2, Moment
from lightning_osdp.planner.simulation import simulate_step
from lightning_osdp.planner.simulation.step import reserved_by

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HERE = Path(__file__).parent
_GIB = 2**30
MEMORY_MEDIAN, MEMORY_WORST = 0.03, 0.07
SPEED_MEDIAN, SPEED_WORST = 0.10, 0.10
TELLABLE = 0.02
"""Difference of published throughputs below which their order says nothing."""
PROFILED = ("keep", "recompute", "selective")
"""Choices of blocks for what they save that are profiled."""
CHECKPOINTED = 0.05
"""Largest error of throughput in sets whose rows checkpoint in other ways than the row that calibrates them."""
_REDUCED = "reduced gradients"
_BLOCK = re.compile(r".*?\.\d+(?=\.)")
_EVERY = {"none": 0, "by operation": 0, "full": 1, "every second block": 2}
"""Checkpointing -> number of blocks of which one recomputes all of its forward; 0: none does."""
FSDP1 = {"FULL_SHARD": ZDP, "SHARD_GRAD_OP": DP, "HYBRID_SHARD": HSDP, "HYBRID_SHARD_ZERO2": HDP}
"""Strategies of FSDP1 -> the mode of units that are nearest to it."""
RESHARDING = 0.25
"""Fraction of the published difference between always and never resharding that the predicted one may be off."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One published row."""

    set: str
    model: str
    machine: str
    """Machine, as `Machine.parse` reads it; ``@`` is the device of ``h100_96.toml``."""
    sequence: int
    batch: int
    """Samples of one GPU, in one micro-batch."""
    checkpointing: str
    """``none``, ``full``, ``every second block``, or ``by operation``, as torchtitan chooses operations."""
    strategy: str = "fully_shard"
    """Strategy: ``fully_shard``, one of `FSDP1`, or ``DDP``."""
    reshard: str = "default"
    """Resharding of ``fully_shard``: ``always``, ``never``, or ``default``: all blocks but the last."""
    zeroes_first: bool = False
    """True if the loop zeroes gradients before forward, and not, as Lightning does, between forward and backward."""
    reduces_bfloat16: bool = False
    """True if mixed precision reduced gradients in bfloat16, and not in float32."""
    expandable_segments: bool = False
    """True if the program had CUDA's allocator grow its segments (``PYTORCH_CUDA_ALLOC_CONF``)."""
    gib: float | None = None
    allocated: bool = False
    """True if `gib` are of tensors, and not what the allocator reserved."""
    holds_less: bool = False
    """True if what was run holds less than the eager step that is predicted, so that `gib` judge no prediction."""
    tokens_per_s: float | None = None
    step_s: float | None = None
    """Seconds of a step, where it is not stated of how many tokens."""
    does_not_fit: bool = False
    calibrates: bool = False
    attention: str | None = None
    """Kernel of attention, of ``[attention]`` in ``published.toml``; None: the one that torch has now."""


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
    """Section of these rows, predicted."""
    return Section(name="published", cases=chosen, measure=measure, table=table, targets=targets)


def measure(case: Case) -> dict[str, Any]:
    """The peak and the throughput of a row as `fully_shard` would have them, with a unit for each block.

    llm-foundry and Lightning measured with FSDP1. Its collectives overlap computing likewise, and it holds no buffer
    beside what is gathered: the nearest is ``fully_shard`` that unshards asynchronously and gathers ahead.
    """
    spec = case.machine.replace("@", str(_HERE / "h100_96.toml"))
    machine = Machine.parse(spec)
    profile = profile_of(
        case.model,
        case.sequence,
        spec,
        by_operation=case.checkpointing == "by operation",
        reduce_dtype=torch.bfloat16 if case.reduces_bfloat16 else torch.float32,
        attention=case.attention,
    )
    setting = _setting(case, profile, machine)
    modes = _modes(case, setting)
    step = simulate_step(setting, modes, engine=setting.engine)
    moments = alive([moment for _, moment in step.moments], zeroes_first=case.zeroes_first)
    # DDP's buckets hold all gradients once more
    buckets_gib = sum(operator.gradient_bytes for operator in profile) / _GIB if case.strategy == "DDP" else 0.0
    peak = max(moments, key=lambda moment: moment.num_bytes)
    reserved_bytes = reserved_by_fsdp1(setting, moments) if case.strategy in FSDP1 else reserved_by(moments)
    live_gib, reserved_gib = (size / _GIB + buckets_gib for size in (peak.num_bytes, reserved_bytes))
    return {
        "live_gib": live_gib,
        "reserved_gib": reserved_gib,
        "predicted_gib": live_gib if case.allocated else reserved_gib / (1 - CUDA_HEADROOM),
        "device_gib": machine.device.memory_mib / 1024,
        "predicted_tokens_per_s": case.batch * case.sequence / step.time_s,
        "compute_s": setting.costs.compute_s,
        "step_s": step.time_s,
        "peak": {"phase": peak.phase, **{name: size / _GIB for name, size in peak.parts.items() if round(size)}},
        **_counted(case, machine, modes),
    }


def alive(moments: Sequence[Moment], *, zeroes_first: bool) -> list[Moment]:
    """Moments of a step with its gradients zeroed before its first forward, if they are, and else as they are given."""
    if not zeroes_first:
        return [*moments]
    before = [*takewhile(lambda moment: moment.phase == "forward", moments)]
    zeroed = [moment.less(_REDUCED, moment.parts[_REDUCED]) for moment in before]
    return [*zeroed, *moments[len(before) :]]


def reserved_by_fsdp1(setting: Setting, moments: Sequence[Moment]) -> float:
    """Bytes that a caching allocator has reserved after these moments of FSDP1, which has other pools.

    FSDP1 allocates what it gathers in the stream of its all-gathers, and reduces in a stream of its own, in which it
    casts the flat gradient of a unit first, under mixed precision; reduced gradients are left there. A flat gradient is
    given to that stream (``record_stream``), and is free for none before the device has come so far: how many are not
    yet depends on the host, and is left out.

    References:
        torch/distributed/fsdp/_runtime_utils.py (``_unshard``, ``_post_backward_hook``, ``_reduce_grad``). [Read.]
    """
    gathered, reduced = ([moment.parts[name] for moment in moments] for name in ("gathered parameters", _REDUCED))
    others = (moment.num_bytes - w - r for moment, w, r in zip(moments, gathered, reduced, strict=True))
    world_size = setting.cluster.world_size
    cast = (unit for unit in setting.units if any(p.sent_itemsize != p.gathered_itemsize for p in unit.parameters))
    flat = max((setting.engine.reduce_scatter_bytes(unit, world_size) for unit in cast), default=0.0)
    return max(others) + max(gathered) + max(reduced) + flat


def _counted(case: Case, machine: Machine, modes: Sequence[Treatment]) -> dict[str, float]:
    """Memory of torch's own step, and of the allocator for it, of rows that say what was reserved."""
    sizes = _sizes(case.model)
    if case.gib is None or case.allocated or case.strategy != "fully_shard" or sizes.kind == "demo":
        return {}
    is_by_operation = case.checkpointing == "by operation"
    every = 1 if is_by_operation else _EVERY[case.checkpointing]
    found = reserved(
        sizes,
        sequence=case.sequence,
        batch=case.batch,
        world_size=machine.world_size,
        checkpointed=frozenset(range(every - 1, sizes.layers, every) if every else ()),
        by_operation=is_by_operation,
        resharded=frozenset(index for index, mode in enumerate(modes[1:]) if mode == ZDP),
        zeroes_first=case.zeroes_first,
        expandable_segments=case.expandable_segments,
    )
    return {
        "counted_gib": found.live_bytes / _GIB,
        "allocator_gib": found.reserved_bytes / _GIB,
        "largest_stream_gib": found.by_stream[0] / _GIB,
    }


def _setting(case: Case, profile: ModelProfile, machine: Machine) -> Setting:
    cluster = machine.cluster if case.strategy != "DDP" else replace(machine, ranks_per_node=1).cluster
    setting = Setting(
        profile=profile,
        units=grouped(profile, _by_block(profile)),
        cluster=cluster,
        workload=Workload(micro_batch_size=case.batch),
        engine=FSDP2(asynchronous_unshard=False) if case.strategy == "fully_shard" else FSDP2(forward_prefetch=True),
    )
    names = [block.name for block in profile.blocks]
    every = _EVERY[case.checkpointing]
    return setting.with_blocks(dict.fromkeys(names[every - 1 :: every] if every else (), "recompute"))


def _by_block(profile: ModelProfile) -> dict[str, list[str]]:
    """Operators of each block, the element of a container, and of the root, which has what is in none."""
    found: dict[str, list[str]] = {"": []}
    for operator in profile:
        block = _BLOCK.match(operator.name)
        found.setdefault(block[0] if block else "", []).append(operator.name)
    return found


def _modes(case: Case, setting: Setting) -> tuple[Treatment, ...]:
    """Modes of the units: ZDP where they are resharded after forward, which the root is not."""
    num_blocks = len(setting.units) - 1
    if case.strategy != "fully_shard":
        # under DDP nothing is gathered: of one rank, that is a unit that is freed
        mode = FSDP1.get(case.strategy, ZDP)
        return (freed_and_kept(mode)[1], *[mode] * num_blocks)
    freed = {"always": num_blocks, "default": num_blocks - 1, "never": 0}[case.reshard]
    return (DP, *[ZDP] * freed, *[DP] * (num_blocks - freed))


def profile_of(
    model: str,
    sequence: int,
    spec: str,
    *,
    by_operation: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
    attention: str | None = None,
) -> ModelProfile:
    """Profile of a model of ``published.toml`` by the rates of a machine.

    It is of two samples, in mixed precision, but for the demo and models in bfloat16, whose gradients are reduced as
    they are computed.
    """
    device = re.sub(r".*\d ([^ ,]+)(,.*)?", r"\1", spec)  # of one, whose rates are those of all
    return _profile(model, sequence, device, by_operation=by_operation, reduce_dtype=reduce_dtype, attention=attention)


def _sizes(model: str) -> Sizes:
    return Sizes(**_document()["models"][model])


@cache
def _profile(
    model: str,
    sequence: int,
    spec: str,
    *,
    by_operation: bool,
    reduce_dtype: torch.dtype,
    attention: str | None,
) -> ModelProfile:
    sizes = _sizes(model)
    with torch.device("meta"):
        module = made(sizes, sequence=sequence, by_operation=by_operation)
    tokens = torch.zeros(2, sequence, dtype=torch.long)
    is_mixed = sizes.kind != "demo" and not sizes.is_bfloat16
    step = TrainingStep(
        module.bfloat16() if sizes.is_bfloat16 else module,
        lambda module: [AdamW(each for each in module.parameters() if each.requires_grad)],
        ComputePrecision(torch.bfloat16, reduce_dtype=reduce_dtype) if is_mixed else ComputePrecision(),
    )
    reached = {} if attention is None else _document()["attention"][attention]
    return profile_model(
        module,
        (tokens, tokens.clone()),
        step,
        rates=replace(Machine.parse(spec).rates, **reached),
        activations=("keep",) if by_operation else PROFILED,
    )


def table(rows: Sequence[Row]) -> Table:
    """One line for each row."""
    drawn = Table("set", "model", "machine", "checkpointing", "resharded", title="Predicted and published")
    for column in (
        *("GiB", "live", "counted", "pools", "with a share", "allocator"),
        *("tokens/s", "predicted", "after calibration"),
    ):
        drawn.add_column(column, justify="right")
    for row in rows:
        case = row["case"]
        factor = _factor(rows, case["set"])
        drawn.add_row(
            case["set"],
            case["model"],
            case["machine"],
            case["checkpointing"],
            case["reshard"] if case["strategy"] == "fully_shard" else case["strategy"],
            _number(case["gib"]) or ("does not fit" if case["does_not_fit"] else ""),
            _number(row["live_gib"]),
            _number(row.get("counted_gib")),
            _number(row["reserved_gib"]),
            _number(row["predicted_gib"]),
            _number(row.get("allocator_gib")),
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


def predicted_gib(row: Row) -> float:
    """Memory that is compared with what was published: by the rules of the allocator, where its steps were counted.

    Elsewhere it is live memory, or pools and the share that default limits leave for rounding and fragmentation.
    """
    return float(row.get("allocator_gib") or row["predicted_gib"])


def memory_errors(rows: Sequence[Row]) -> list[float]:
    """Relative errors of memory, of rows that can be stated."""
    judged = [row for row in rows if row["case"]["gib"] and not row["case"].get("holds_less")]
    return [predicted_gib(row) / row["case"]["gib"] - 1 for row in judged]


def rates(rows: Sequence[Row]) -> list[float]:
    """Published over predicted tokens/s, by the catalog's rates alone, of rows that were run as they are predicted."""
    timed = [row for row in rows if row["case"]["tokens_per_s"] and not row["case"].get("holds_less")]
    return [row["case"]["tokens_per_s"] / row["predicted_tokens_per_s"] for row in timed]


def wrong_orders(rows: Sequence[Row]) -> list[tuple[Row, Row]] | None:
    """Pairs of rows of one set and model whose order by tokens/s is not the published one; None without any pair.

    Rows whose published numbers are less than `TELLABLE` apart are no pair.
    """
    timed = [row for row in rows if row["case"]["tokens_per_s"]]
    pairs = [
        (one, other) if one["case"]["tokens_per_s"] < other["case"]["tokens_per_s"] else (other, one)
        for one, other in combinations(timed, 2)
        if all(one["case"][name] == other["case"][name] for name in ("set", "model"))
    ]
    told = [
        (slow, fast)
        for slow, fast in pairs
        if fast["case"]["tokens_per_s"] / slow["case"]["tokens_per_s"] - 1 >= TELLABLE
    ]
    wrong = [each for each in told if each[0]["predicted_tokens_per_s"] >= each[1]["predicted_tokens_per_s"]]
    return wrong if told else None


def targets(rows: Sequence[Row]) -> list[Target]:
    """Targets of the rows' errors."""
    return [*_targets(rows)]


def _targets(rows: Sequence[Row]) -> Iterator[Target]:
    memory = [abs(error) for error in memory_errors(rows)]
    if memory:
        yield Target(name="memory: median error", limit=MEMORY_MEDIAN, measured=median(memory))
        yield Target(name="memory: worst error", limit=MEMORY_WORST, measured=max(memory))
    speed = [abs(error) for error in speed_errors(rows, ("B", "E", "I"))]
    if speed:
        yield Target(name="tokens/s of B, E and I: median error", limit=SPEED_MEDIAN, measured=median(speed))
        yield Target(name="tokens/s of B, E and I: worst error", limit=SPEED_WORST, measured=max(speed))
    for name in ("R2", "E"):
        checkpointed = [abs(error) for error in speed_errors(rows, (name,))]
        if checkpointed:
            what = f"tokens/s of {name}, checkpointed in other ways: worst error"
            yield Target(name=what, limit=CHECKPOINTED, measured=max(checkpointed))
    wrong = wrong_orders(rows)
    if wrong is not None:
        yield Target(name="pairs of rows of one model in the wrong order of tokens/s", limit=1, measured=len(wrong))
    outside = [rate for rate in rates(rows) if not PUBLISHED_RATES[0] <= rate <= PUBLISHED_RATES[1]]
    name = "rows whose tokens/s are not in the range that the catalog's rates are said to have"
    yield Target(name=name, limit=1, measured=len(outside))
    for name in ("G7", "G3"):
        slope = [abs(error) for error in speed_errors(rows, (name,))]
        if slope:
            yield Target(name=f"tokens/s of {name} over ranks: worst error", limit=SPEED_WORST, measured=max(slope))
    steps = sorted((row for row in rows if row["case"].get("step_s")), key=lambda row: -row["case"]["step_s"])
    for slower, faster in pairwise(steps):
        name = f"R1, {faster['case']['checkpointing']} over {slower['case']['checkpointing']}: seconds of a step"
        yield Target(name=name, limit=1, measured=faster["step_s"] / slower["step_s"])
    resharding = {row["case"]["reshard"]: row for row in rows if row["case"]["set"] == "A"}
    if {"always", "never"} <= resharding.keys():
        always, never = resharding["always"], resharding["never"]
        for what, predicted, published in (
            ("GiB", predicted_gib(never) - predicted_gib(always), never["case"]["gib"] - always["case"]["gib"]),
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
            fits = row["live_gib"] <= row["device_gib"]
            name = f"{case['set']}, {case['model']}, checkpointing {case['checkpointing']}: wrong whether it fits"
            yield Target(name=name, limit=1, measured=float(fits == case["does_not_fit"]))
