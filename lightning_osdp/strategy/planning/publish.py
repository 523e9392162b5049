"""Output of planning: progress, then the plan, which is written, printed and compared with measurements."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from rich.console import Console
from rich.live import Live
from rich.text import Text

from lightning_osdp.callbacks.peak import all_callbacks, callbacks_of
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.progress import Progress, silent
from lightning_osdp.core.text.stored import CLUSTER_FILENAME, PLAN_FILENAME, PROFILE_FILENAME
from lightning_osdp.planner.simulation import StepEstimate, simulate
from lightning_osdp.report.advice import Advice, advise
from lightning_osdp.report.picture import save_picture
from lightning_osdp.report.tables import plan_table, show
from lightning_osdp.strategy.runtime.all_ranks import on_rank_zero

_LINES_APART_S = 10.0
"""Least seconds between two lines of a stage, where lines are not overwritten."""


@contextmanager
def shown_progress(*, is_global_zero: bool) -> Iterator[Progress]:
    """Yields a function that shows progress on rank 0: one changing line on a terminal, a few lines anywhere else.

    No thread refreshes the line on a terminal, which would disturb measurements.
    """
    console = Console()
    if not is_global_zero:
        yield silent
    elif console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda stage, detail: live.update(Text(_sentence(stage, detail), no_wrap=True), refresh=True)
    else:
        yield _lines()


def _lines() -> Progress:
    last_stage, last_s = "", 0.0

    def show(stage: str, detail: str) -> None:
        nonlocal last_stage, last_s
        if stage == last_stage and time.perf_counter() - last_s < _LINES_APART_S:
            return
        rank_zero_info(_sentence(stage, detail))
        last_stage, last_s = stage, time.perf_counter()

    return show


def _sentence(stage: str, detail: str) -> str:
    return f"OSDP: {stage}" + (f", {detail}" if detail else "")


def publish(
    trainer: pl.Trainer,
    plan: Plan,
    profile: ModelProfile | None = None,
    cluster: Cluster | None = None,
    *,
    state_dict_type: str = "full",
) -> None:
    """Writes, draws and prints the plan on rank 0, and adds a `PlanMonitor` to a fit. All ranks call it.

    Profile and cluster are written beside the plan, for `lightning-osdp`; both are None where the plan was given.
    """
    path, is_kept = _path(trainer), _is_kept(trainer)

    def write() -> None:
        estimate: StepEstimate | None = None
        advice: Sequence[Advice] = ()
        if profile is not None and cluster is not None:
            predicted = plan.as_profiled(profile)
            estimate, advice = simulate(predicted, profile, cluster), advise(predicted, profile, cluster)
            if is_kept:
                profile.save(path.with_name(PROFILE_FILENAME))
                cluster.save(path.with_name(CLUSTER_FILENAME))
        if is_kept:
            plan.save(path)
        show(plan_table(plan, advice))
        if is_kept:
            rank_zero_info(f"OSDP: plan written to {path}; {_draw(plan, path.with_suffix('.svg'), estimate)}")
        if estimate is not None and trainer.checkpoint_callbacks and trainer.strategy.root_device.type == "cpu":
            _log_saving_bytes(plan, estimate, state_dict_type)

    on_rank_zero(write)
    if trainer.state.fn == TrainerFn.FITTING and not callbacks_of(trainer, PlanMonitor):
        all_callbacks(trainer).append(PlanMonitor())


def write_plan(trainer: pl.Trainer, plan: Plan) -> None:
    """Writes and draws a plan that has taken the place of the published one, on rank 0. All ranks call it."""
    path = _path(trainer)

    def write() -> None:
        plan.save(path)
        _draw(plan, path.with_suffix(".svg"), None)

    if _is_kept(trainer):
        on_rank_zero(write)


def _path(trainer: pl.Trainer) -> Path:
    """Path of the plan's file. All ranks call it: the Trainer broadcasts its folder."""
    return Path(trainer.log_dir or trainer.default_root_dir) / PLAN_FILENAME


def _is_kept(trainer: pl.Trainer) -> bool:
    """Tells whether a run leaves files."""
    return not trainer.fast_dev_run  # type: ignore[attr-defined]  # set by a connector


def _draw(plan: Plan, path: Path, estimate: StepEstimate | None) -> str:
    """Draws the plan and tells where the picture is; without matplotlib, tells how to get one."""
    memory = [] if estimate is None else [moment for _, moment in estimate.moments]
    try:
        save_picture(plan, path, memory=memory)
    except ImportError:
        return 'a picture of it needs matplotlib: pip install "lightning-osdp[plots]"'
    return f"drawn beside it as {path.name}"


def _log_saving_bytes(plan: Plan, estimate: StepEstimate, state_dict_type: str) -> None:
    """Says if saving a checkpoint takes more than the memory limit; on a GPU state dicts go to the host instead."""
    saving_bytes = estimate.saving_bytes[state_dict_type]
    if saving_bytes > plan.memory_limit_bytes:
        sharded = format_bytes(estimate.saving_bytes["sharded"])
        remedy = f' OSDPStrategy(state_dict_type="sharded") takes {sharded}.' if state_dict_type == "full" else ""
        rank_zero_info(
            f"OSDP: saving a {state_dict_type} checkpoint may take {format_bytes(saving_bytes)} on rank 0, more than"
            f" memory_limit ({format_bytes(plan.memory_limit_bytes)}), which is about training.{remedy}"
        )


def warn_of_unfreezing(trainer: pl.Trainer) -> None:
    """Warns of finetuning callbacks: the plan counts parameters as frozen that they unfreeze later."""
    for callback in callbacks_of(trainer, BaseFinetuning):
        rank_zero_warn(
            f"OSDP: {type(callback).__name__} unfreezes parameters later, which then have gradients and states of"
            " optimizers; the plan counts them as they are when fit begins. Leave room below memory_limit for them."
        )
