"""Optimal sharded data parallel training for PyTorch Lightning; importing it registers ``strategy="osdp"``."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_osdp.apply import apply_plan
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.search_space import SearchSpace
from lightning_osdp.errors import (
    ConfigurationError,
    InfeasibleError,
    OSDPError,
    PlanFormatError,
    PlanMismatchError,
    ProfileError,
)
from lightning_osdp.profiler import measure_cluster, profile_model
from lightning_osdp.scheduler import make_plan
from lightning_osdp.strategy import OSDPPrecision, OSDPStrategy

if OSDPStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        OSDPStrategy.strategy_name,
        OSDPStrategy,
        description="Optimal Sharded Data Parallel: sharding decided per operator, under a memory limit",
    )

__all__ = [
    "Cluster",
    "ConfigurationError",
    "InfeasibleError",
    "ModelProfile",
    "OSDPError",
    "OSDPPrecision",
    "OSDPStrategy",
    "Plan",
    "PlanFormatError",
    "PlanMismatchError",
    "ProfileError",
    "SearchSpace",
    "apply_plan",
    "make_plan",
    "measure_cluster",
    "profile_model",
]
