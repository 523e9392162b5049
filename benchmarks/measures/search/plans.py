"""Models for the planner, and what whole plans of them cost and are worth; `benchmarks/search.py` prints it.

The models are stated, not profiled: equal units, random units, and the blocks of a transformer.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Cluster, Link, UnitOverhead
from lightning_osdp.core.profile import ModelProfile, OperatorProfile, Segment
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting, assign_modes
from lightning_osdp.planner.cost import Workload
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.scheduler import make_plan

LINK = Link(latency_s=10e-6, seconds_per_byte=1 / 50e9)
OVERHEAD = {"gather": UnitOverhead(fixed_s=10e-6), "flatten": UnitOverhead(fixed_s=40e-6)}
WORLD_SIZE = 16
SAMPLES = 2
"""Samples of a micro-batch."""
SWEPT_SAMPLES = 8
"""Samples of a step that is divided into 1, 2, 4 or 8 micro-batches: all of these are planned for."""


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """All problems of one kind."""

    problem: str
    num_operators: int
    overlaps: bool
    median_s: float
    slowest_s: float
    largest_gap: float
    num_problems: int


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Distance of the search from the best of all modes, where there are few enough to try them all."""

    num_problems: int
    num_best: int
    largest_distance: float
    """Step time over the least one of all modes that fit, less one."""
    largest_gap: float
    num_violated: int
    """Problems in which some modes that fit are faster than the bound."""


def cluster(*, overlaps: bool) -> Cluster:
    """Returns ranks whose collectives overlap computing or not."""
    return Cluster(
        world_size=WORLD_SIZE, all_gather=LINK, reduce_scatter=LINK, unit_overhead=OVERHEAD, overlaps=overlaps
    )


def operator(name: str, num_parameters: int) -> OperatorProfile:
    """Returns a float32 operator under Adam; a module of its own, and its ancestors enclose it but for ``h``."""
    parts, num_bytes = name.split("."), 4 * num_parameters
    above = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return OperatorProfile(
        name=name,
        kind=parts[-1],
        enclosing=(*(module for module in above if module != "h"), ""),
        parameter_bytes=num_bytes,
        num_trainable=num_parameters,
        gathered_bytes=num_bytes,
        trainable_bytes=num_bytes,
        gradient_bytes=num_bytes,
        optimizer_bytes=2 * num_bytes,
    )


def model(parts: Iterable[tuple[str, int, float, float]]) -> ModelProfile:
    """Returns a model of (name, parameters, seconds of forward, bytes saved) per operator and sample, in order."""
    operators, segments = [], {}
    for name, num_parameters, forward_s, saved_bytes in parts:
        operators.append(operator(name, num_parameters))
        segments[name] = Segment(
            operator=name,
            forward_s=Affine(0.0, forward_s),
            backward_s=Affine(0.0, 2 * forward_s),
            saved_bytes=Affine(0.0, saved_bytes),
        )
    return ModelProfile.in_turn(operators, segments)


def chain(num_units: int, busy: float, *, seed: int | None = None) -> ModelProfile:
    """Returns units of which forward takes ``busy`` times as long as a gather: equal ones, or random ones of a seed."""
    draw = random.Random(seed)
    parts = []
    for index in range(num_units):
        size = 1e6 if seed is None else 10 ** draw.uniform(5, 7)
        forward_s = busy * LINK.ring_s(4 * size, WORLD_SIZE) * (1 if seed is None else draw.uniform(0.3, 2.0))
        parts.append((f"m{index}", int(size), forward_s / SAMPLES, size))
    return model(parts)


def transformer(num_blocks: int) -> ModelProfile:
    """Returns a decoder as minGPT's: 50,304 tokens, on devices of 100 TFLOP/s."""
    width, num_tokens = 2048, 1024

    def part(
        name: str, num_parameters: int, channels: int, *, multiplies: bool = True
    ) -> tuple[str, int, float, float]:
        flops = 2 * num_parameters * num_tokens if multiplies else 10 * channels * num_tokens
        return name, num_parameters, flops / 100e12, 4.0 * channels * num_tokens

    parts = [part("wte", 50304 * width, width, multiplies=False)]
    for block in (f"h.{index}" for index in range(num_blocks)):
        parts += [
            part(f"{block}.ln_1", 2 * width, width, multiplies=False),
            part(f"{block}.attn.c_attn", 3 * width * (width + 1), 3 * width),
            part(f"{block}.attn.c_proj", width * (width + 1), width),
            part(f"{block}.ln_2", 2 * width, width, multiplies=False),
            part(f"{block}.mlp.c_fc", 4 * width * (width + 1), 4 * width),
            part(f"{block}.mlp.c_proj", width * (4 * width + 1), 4 * width),
        ]
    return model([*parts, part("ln_f", 2 * width, width, multiplies=False), part("head", 50304 * width, 50304)])


def setting(profile: ModelProfile, *, overlaps: bool, prefetch: str = "pre", num_micro_batches: int = 1) -> Setting:
    """Returns one unit per operator."""
    return Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=0),
        cluster=cluster(overlaps=overlaps),
        workload=Workload(micro_batch_size=SAMPLES, num_micro_batches=num_micro_batches),
        engine=FSDP2(backward_prefetch=prefetch),
    )


def limit_bytes(found: Setting, share: float) -> int:
    """Returns a limit that share of the way from the least peak to that of keeping everything."""
    least = found.costs.peak(found.costs.least_memory_modes).peak_bytes
    most = found.costs.peak((DP,) * len(found.units)).peak_bytes
    return int(least + share * (most - least))


def measure_plans(sizes: Sequence[int], blocks: Sequence[int], shares: Sequence[float]) -> list[PlanRow]:
    """Returns rows of chains (modes alone) and of transformers (whole plans, sweeps), without and with overlap."""
    rows = []
    for overlaps, size in itertools.product((False, True), sizes):
        for name, seed in (("equal units", None), ("random units", 0)):
            chains = [setting(chain(size, busy, seed=seed), overlaps=overlaps) for busy in (0.3, 1.0, 3.0)]
            rows.append(row(f"modes, {name}", size, overlaps, [_modes(each, s) for each in chains for s in shares]))
    for overlaps, num_blocks in itertools.product((False, True), blocks):
        profile = transformer(num_blocks)
        for name, policy in (("plan", BatchPolicy.fixed(SAMPLES)), ("sweep", BatchPolicy.divide(SWEPT_SAMPLES))):
            solves = [_plan(profile, share, policy, overlaps=overlaps) for share in shares]
            rows.append(row(f"{name}, {num_blocks} blocks", len(profile.operators), overlaps, solves))
    return rows


def _modes(found: Setting, share: float) -> Callable[[], float]:
    limit = limit_bytes(found, share)

    def solve() -> float:
        assigned = assign_modes(found, memory_limit_bytes=limit)
        assert assigned is not None
        return assigned.gap

    return solve


def _plan(profile: ModelProfile, share: float, policy: BatchPolicy, *, overlaps: bool) -> Callable[[], float]:
    limit = limit_bytes(setting(profile, overlaps=overlaps), share)
    ranks = cluster(overlaps=overlaps)
    return lambda: make_plan(profile, ranks, memory_limit_bytes=limit, micro_batch_size=policy).gap


def row(problem: str, num_operators: int, overlaps: bool, solves: Sequence[Callable[[], float]]) -> PlanRow:
    """Returns seconds and gaps of problems of one kind, each of which is solved once and returns its gap."""
    seconds, gaps = [], []
    for solve in solves:
        start_s = time.process_time()
        gaps.append(solve())
        seconds.append(time.process_time() - start_s)
    return PlanRow(
        problem=problem,
        num_operators=num_operators,
        overlaps=overlaps,
        median_s=statistics.median(seconds),
        slowest_s=max(seconds),
        largest_gap=max(gaps),
        num_problems=len(solves),
    )


def measure_distance(num_problems: int) -> Distance:
    """Returns what the search under overlap leaves open on small random chains of all kinds."""
    distances, gaps, num_violated = [], [], 0
    for seed in range(num_problems):
        draw = random.Random(seed)
        found = setting(
            chain(8, draw.choice([0.1, 0.3, 1.0, 3.0]), seed=seed),
            overlaps=True,
            prefetch=draw.choice(["pre", "none"]),
            num_micro_batches=draw.choice([1, 4]),
        )
        limit = limit_bytes(found, draw.choice([0.0, 0.1, 0.3, 0.5, 0.8]))
        assigned = assign_modes(found, memory_limit_bytes=limit)
        assert assigned is not None
        fitting = (
            modes for modes in itertools.product(*found.costs.options) if found.costs.peak(modes).peak_bytes <= limit
        )
        best_s = min(map(found.costs.step_time_s, fitting))
        distances.append(assigned.step_time_s / best_s - 1)
        gaps.append(assigned.gap)
        num_violated += assigned.bound_s > best_s * (1 + 1e-9)
    return Distance(
        num_problems=num_problems,
        num_best=sum(distance < 1e-9 for distance in distances),
        largest_distance=max(distances),
        largest_gap=max(gaps),
        num_violated=num_violated,
    )


def plan_table(rows: Sequence[PlanRow]) -> Table:
    """Returns the rows as people read them."""
    drawn = Table("problem", "collectives")
    for column in ("operators", "median", "slowest", "largest gap", "problems"):
        drawn.add_column(column, justify="right")
    for row in rows:
        drawn.add_row(
            row.problem,
            "overlap" if row.overlaps else "block",
            f"{row.num_operators:,}",
            format_seconds(row.median_s),
            format_seconds(row.slowest_s),
            f"{row.largest_gap:.3%}",
            str(row.num_problems),
        )
    return drawn
