"""Callbacks that watch a training under a plan."""

from lightning_osdp.callbacks.plan_monitor import Measured, PlanMonitor

__all__ = ["Measured", "PlanMonitor"]
