"""A new plan, shown to people: written, printed, and checked against what training measures."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_osdp.callbacks import PlanMonitor
from lightning_osdp.core.plan import Plan
from lightning_osdp.report import plan_table, show

PLAN_FILENAME = "osdp_plan.json"


def publish(trainer: pl.Trainer, plan: Plan) -> None:
    """Writes and prints the plan on rank 0, and has its predictions checked when fit ends."""
    path = Path(trainer.log_dir or trainer.default_root_dir) / PLAN_FILENAME
    if trainer.is_global_zero:
        plan.save(path)
        show(plan_table(plan))
    rank_zero_info(f"OSDP: plan written to {path}")
    if trainer.state.fn == TrainerFn.FITTING:
        # First, so that its clock stops before other callbacks validate, log or save.
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        monitors = [callback for callback in callbacks if isinstance(callback, PlanMonitor)] or [PlanMonitor()]
        callbacks[:] = [*monitors, *(callback for callback in callbacks if not isinstance(callback, PlanMonitor))]
