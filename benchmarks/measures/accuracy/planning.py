"""Cost of planning: profile and search for a large minGPT on the meta device, in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn import functional as F
from torch.optim import AdamW

from benchmarks.measures.section import Row, Section, Target
from examples.mingpt.model import GPT, GPTConfig
from lightning_osdp import Cluster, TrainingStep, make_plan, profile_model
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Link

HIDDEN_SIZE, NUM_RANKS, NUM_SAMPLES = 2048, 8, 2
NUM_LAYERS = (48, 96)
NUM_RUNS = 3
"""Runs of each size, of which the fastest counts."""
_LINK = Link(latency_s=1e-5, seconds_per_byte=1e-10)
_BYTES_PER_LAYER = 400 * 2**20
"""Bytes of the memory limit for each layer: too few to keep all layers gathered, enough to shard all of them."""
_SECONDS, _BYTES, _GROWTH = 60.0, 4e9, 0.1
_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of planning."""

    num_layers: int
    run: int


def section(num_cases: int) -> Section:
    """Section of both sizes in turns: what slows the machine for a while slows both."""
    runs = range(min(num_cases, NUM_RUNS))
    return Section(
        name="planning",
        cases=[Case(num_layers=num_layers, run=run) for run in runs for num_layers in NUM_LAYERS],
        measure=measure,
        table=table,
        targets=targets,
    )


def measure(case: Case) -> dict[str, Any]:
    """Plans in a process of its own, with the interpreter's default number of threads.

    Returns:
        Seconds as ``profile_s`` and ``plan_s``, ``cpu_s`` of all threads, and ``peak_rss_bytes``.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "benchmarks.measures.accuracy.planning", str(case.num_layers)]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"Planning for {case.num_layers} layers ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def plan_once(num_layers: int) -> dict[str, Any]:
    """Profiles and plans in this process."""
    config = GPTConfig(num_layers=num_layers, num_heads=16, hidden_size=HIDDEN_SIZE)
    with torch.device("meta"):
        model = GPT(config)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    profile = profile_model(
        model,
        torch.zeros(NUM_SAMPLES, config.sequence_length, dtype=torch.long),
        TrainingStep(loss, lambda module: [AdamW(module.parameters())]),
    )
    profiled_s = time.perf_counter()
    plan = make_plan(
        profile,
        Cluster(world_size=NUM_RANKS, all_gather=_LINK, reduce_scatter=_LINK),
        memory_limit_bytes=num_layers * _BYTES_PER_LAYER,
        micro_batch_size=BatchPolicy.scale(),
    )
    return {
        "profile_s": profiled_s - start_s,
        "plan_s": time.perf_counter() - profiled_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_units": len(plan.units),
        "micro_batch_size": plan.micro_batch_size,
        "gap": plan.gap,
    }


def table(rows: Sequence[Row]) -> Table:
    """The fastest run of each size."""
    drawn = Table("layers", title=f"Planning for a minGPT of hidden size {HIDDEN_SIZE} on the meta device")
    for column in ("parameters", "profile", "search", "together", "CPU", "peak RSS"):
        drawn.add_column(column, justify="right")
    for num_layers in dict.fromkeys(row["case"]["num_layers"] for row in rows):
        row = fastest(rows, num_layers)
        drawn.add_row(
            str(num_layers),
            f"{row['num_parameters'] / 1e9:.2f} x 10^9",
            *(f"{row[name]:.1f} s" for name in ("profile_s", "plan_s")),
            f"{_seconds(row):.1f} s",
            f"{row['cpu_s']:.1f} s",
            f"{row['peak_rss_bytes'] / 1e9:.2f} GB",
        )
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """Seconds, bytes, and what twice as many layers add."""
    few, many = (fastest(rows, num_layers) for num_layers in NUM_LAYERS)
    return [
        Target(name=f"planning, {NUM_LAYERS[0]} layers: s", limit=_SECONDS, measured=_seconds(few)),
        Target(name=f"planning, {NUM_LAYERS[0]} layers: bytes", limit=_BYTES, measured=few["peak_rss_bytes"]),
        *(
            Target(name=f"planning, {NUM_LAYERS[1]} layers: more {what}", limit=_GROWTH, measured=after / before - 1)
            for what, before, after in (
                ("s", _seconds(few), _seconds(many)),
                ("CPU s", few["cpu_s"], many["cpu_s"]),
                ("bytes", few["peak_rss_bytes"], many["peak_rss_bytes"]),
            )
        ),
    ]


def fastest(rows: Sequence[Row], num_layers: int) -> Row:
    """The fastest run of one size."""
    return min((row for row in rows if row["case"]["num_layers"] == num_layers), key=_seconds)


def _seconds(row: Row) -> float:
    seconds: float = row["profile_s"] + row["plan_s"]
    return seconds


if __name__ == "__main__":
    print(json.dumps(plan_once(int(sys.argv[1]))))
