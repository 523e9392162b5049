"""Time of a step of two large layers in slices, as a ratio to whole ones: predicted, and measured on two gloo ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from benchmarks.families.dense import TwoLayers
from benchmarks.measures.accuracy.step_time import compared_s, predicted_s
from benchmarks.measures.section import Row, Section
from benchmarks.measures.splitting.peaks import MODES, NUM_SLICES, plan_for
from benchmarks.testbed.local import local_ranks
from lightning_osdp import measure_cluster, profile_model
from lightning_osdp.strategy.runtime.all_ranks import in_step

MEASURED, PREDICTED = (1024, 2048, 4096), (8192, 12288)
"""Hidden sizes: all plans of one that is measured live in one process."""
NUM_RANKS, NUM_SAMPLES, NUM_ROUNDS = 2, 64, 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """All numbers of slices, all ZDP and all DP, in turns."""

    hidden_size: int
    is_measured: bool
    num_ranks: int = NUM_RANKS
    num_rounds: int = NUM_ROUNDS


def section(hidden_sizes: Sequence[int]) -> Section:
    """Each size once."""
    return Section(
        name="time",
        cases=[Case(hidden_size=size, is_measured=size in MEASURED) for size in hidden_sizes],
        measure=measure,
        table=table,
    )


def measure(case: Case) -> dict[str, Any]:
    """Runs the case on ranks of this machine, one thread each.

    Returns:
        Under ``plans`` the ``mode``, the ``num_slices`` and ``predicted_s`` of each, and where it is measured
        ``measured_s``.
    """
    function = measured_on_one_rank if case.is_measured else predicted_on_one_rank
    arguments = {"hidden_size": case.hidden_size, "num_rounds": case.num_rounds}
    return {"plans": local_ranks(case.num_ranks).run(function, **arguments)[0]}


def measured_on_one_rank(*, hidden_size: int, num_rounds: int) -> list[dict[str, Any]]:
    """What every rank runs where steps are taken."""
    cluster = measure_cluster(torch.device("cpu"))
    module = TwoLayers(hidden_size)
    profile = profile_model(module, module.batch(NUM_SAMPLES), together=in_step)
    plans = {
        name: plan_for(module, mode, num_slices, world_size=cluster.world_size, num_samples=NUM_SAMPLES)
        for name, (mode, num_slices) in _choices().items()
    }
    timed = compared_s(lambda: TwoLayers(hidden_size), plans, profile, cluster, num_rounds=num_rounds)
    return [
        {"mode": mode, "num_slices": num_slices, "predicted_s": plan.predicted_s, "measured_s": plan.measured_s}
        for (mode, num_slices), plan in zip(_choices().values(), timed, strict=True)
    ]


def predicted_on_one_rank(*, hidden_size: int, num_rounds: int) -> list[dict[str, Any]]:
    """What every rank runs where steps are predicted only: operations are timed one by one."""
    cluster = measure_cluster(torch.device("cpu"))
    with torch.device("meta"):
        module = TwoLayers(hidden_size)
    profile = profile_model(module, module.batch(NUM_SAMPLES))
    found = []
    for mode, num_slices in _choices().values():
        plan = plan_for(module, mode, num_slices, world_size=cluster.world_size, num_samples=NUM_SAMPLES)
        seconds = predicted_s(plan, profile, cluster)
        found.append({"mode": mode, "num_slices": num_slices, "predicted_s": seconds})
    return found


def table(rows: Sequence[Row]) -> Table:
    """Seconds of whole layers, and ratios to them: measured, and predicted in brackets."""
    title = f"Step time of two layers in slices over whole ones, {NUM_RANKS} gloo ranks: measured (predicted)"
    drawn = Table("hidden size", "mode", title=title)
    for column in (f"{num_slices} slices" for num_slices in NUM_SLICES):
        drawn.add_column(column, justify="right")
    for row in rows:
        for mode in MODES:
            whole, *split = of_mode(row, mode)
            drawn.add_row(
                f"2 x {row['case']['hidden_size']}",
                mode,
                _shown({name: f"{seconds:.3f} s" for name, seconds in _seconds(whole).items()}),
                *(_shown({name: f"{ratio:.2f}" for name, ratio in ratios(plan, whole).items()}) for plan in split),
            )
    return drawn


def of_mode(row: Row, mode: str) -> list[dict[str, Any]]:
    """Plans of one mode, whole layers first."""
    return [plan for plan in row["plans"] if plan["mode"] == mode]


def ratios(plan: dict[str, Any], whole: dict[str, Any]) -> dict[str, float]:
    """What was ``measured`` and ``predicted`` of a plan over the same of whole layers."""
    of_whole = _seconds(whole)
    return {name: seconds / of_whole[name] for name, seconds in _seconds(plan).items()}


def _seconds(plan: dict[str, Any]) -> dict[str, float]:
    return {name: plan[f"{name}_s"] for name in ("measured", "predicted") if f"{name}_s" in plan}


def _shown(texts: dict[str, str]) -> str:
    return " ".join(text if name == "measured" else f"({text})" for name, text in texts.items())


def _choices() -> dict[str, tuple[str, int]]:
    return {f"{mode} {num_slices}": (mode, num_slices) for mode in MODES for num_slices in NUM_SLICES}
