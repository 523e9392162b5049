"""Optimal sharded data parallel training for PyTorch Lightning; importing it registers ``strategy="osdp"``."""

from __future__ import annotations

from importlib.metadata import version

from lightning.pytorch.strategies import StrategyRegistry

from lightning_osdp.apply import apply_plan, change_plan
from lightning_osdp.callbacks import PlanMonitor
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Cluster, DeviceRates, Link, Links
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.engine import FSDP2
from lightning_osdp.errors import (
    ConfigurationError,
    InfeasibleError,
    OSDPError,
    PlanFormatError,
    PlanMismatchError,
    ProfileError,
)
from lightning_osdp.profiler import ComputePrecision, TrainingStep, measure_cluster, profile_model
from lightning_osdp.report import chrome_trace, compare_plans, draw_plan, find_alternatives, render_plan, what_if
from lightning_osdp.scheduler import PlanMethod, make_plan
from lightning_osdp.simulation import StepEstimate, simulate
from lightning_osdp.strategy import OSDPPrecision, OSDPStrategy
from lightning_osdp.strategy.runtime.launcher import REGISTERED

__version__ = version("lightning-osdp")

for _name, _start_method in REGISTERED.items():
    if _name not in StrategyRegistry:
        StrategyRegistry.register(
            _name,
            OSDPStrategy,
            description=f"Optimal Sharded Data Parallel: sharded as far as memory demands; ranks by {_start_method!r}",
            start_method=_start_method,
        )

__all__ = [
    "FSDP2",
    "BatchPolicy",
    "Cluster",
    "ComputePrecision",
    "ConfigurationError",
    "DeviceRates",
    "InfeasibleError",
    "Link",
    "Links",
    "ModelProfile",
    "OSDPError",
    "OSDPPrecision",
    "OSDPStrategy",
    "Plan",
    "PlanFormatError",
    "PlanMethod",
    "PlanMismatchError",
    "PlanMonitor",
    "ProfileError",
    "SearchSpace",
    "StepEstimate",
    "TrainingStep",
    "apply_plan",
    "change_plan",
    "chrome_trace",
    "compare_plans",
    "draw_plan",
    "find_alternatives",
    "make_plan",
    "measure_cluster",
    "profile_model",
    "render_plan",
    "simulate",
    "what_if",
]
