"""A new plan, shown to people: written, printed, and checked against what training measures."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_osdp.callbacks import PlanMonitor
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.stored import CLUSTER_FILENAME, PLAN_FILENAME, PROFILE_FILENAME
from lightning_osdp.report import plan_table, save_picture, show
from lightning_osdp.simulation import StepEstimate
from lightning_osdp.strategy.runtime.all_ranks import on_rank_zero

NOT_DRAWN = 'a picture of it needs matplotlib: pip install "lightning-osdp[plots]"'


def publish(trainer: pl.Trainer, plan: Plan, estimate: StepEstimate | None) -> None:
    """Writes, draws and prints the plan on rank 0, and has its predictions checked while it trains. All ranks call it.

    Args:
        trainer: whose log directory gets the plan and its picture.
        plan: the plan in use.
        estimate: what a step was predicted to take; None where a plan was given.
    """
    path = _folder(trainer) / PLAN_FILENAME

    is_kept = not trainer.fast_dev_run  # type: ignore[attr-defined]  # set by a connector; such a run leaves no files

    def write() -> None:
        if is_kept:
            plan.save(path)
        show(plan_table(plan))
        if is_kept:
            rank_zero_info(f"OSDP: plan written to {path}; {_draw(plan, path.with_suffix('.svg'), estimate)}")
        _tell_of_saving(trainer, plan, estimate)

    on_rank_zero(write)
    if trainer.state.fn == TrainerFn.FITTING:
        # First, so that its clock stops before other callbacks validate, log or save.
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        monitors = [callback for callback in callbacks if isinstance(callback, PlanMonitor)] or [PlanMonitor()]
        for monitor in monitors:
            monitor.use(plan)
        callbacks[:] = [*monitors, *(callback for callback in callbacks if not isinstance(callback, PlanMonitor))]


def store_inputs(trainer: pl.Trainer, profile: ModelProfile, cluster: Cluster) -> None:
    """Writes what a plan is made of beside it, for `lightning-osdp`. All ranks call it."""
    folder = _folder(trainer)

    def write() -> None:
        profile.save(folder / PROFILE_FILENAME)
        cluster.save(folder / CLUSTER_FILENAME)

    if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
        on_rank_zero(write)


def _folder(trainer: pl.Trainer) -> Path:
    """Of the run; all ranks ask for it."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def _draw(plan: Plan, path: Path, estimate: StepEstimate | None) -> str:
    """Draws the plan, and says where; without matplotlib, how to get a picture."""
    memory = [] if estimate is None else [moment for _, moment in estimate.moments]
    try:
        save_picture(plan, path, memory=memory)
    except ImportError:
        return NOT_DRAWN
    return f"drawn beside it as {path.name}"


def _tell_of_saving(trainer: pl.Trainer, plan: Plan, estimate: StepEstimate | None) -> None:
    """Says where a checkpoint takes more than the limit; on a GPU its state dicts go to the host instead."""
    strategy = trainer.strategy
    assert isinstance(strategy, FSDPStrategy)
    if estimate is None or strategy.root_device.type != "cpu" or not trainer.checkpoint_callbacks:
        return
    kind = strategy._state_dict_type
    needed = estimate.saving_bytes[kind]
    if needed > plan.memory_limit_bytes:
        sharded = format_bytes(estimate.saving_bytes["sharded"])
        remedy = f' OSDPStrategy(state_dict_type="sharded") takes {sharded}.' if kind == "full" else ""
        rank_zero_info(
            f"OSDP: saving a {kind} checkpoint may take {format_bytes(needed)} on rank 0, more than memory_limit"
            f" ({format_bytes(plan.memory_limit_bytes)}), which is about training.{remedy}"
        )
