"""Optimal sharded data parallel training for PyTorch Lightning; importing it registers ``strategy="osdp"``.

Names that need torch or Lightning are imported at first use: planning and `lightning-osdp` need neither.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Cluster, Contention, DeviceRates, Link, Links, UnitOverhead
from lightning_osdp.core.correction import Correction
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.plans.parts import Block, Cost, Decision, Option, Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import (
    BlockProfile,
    Crossing,
    Cut,
    Level,
    ModelProfile,
    OperatorProfile,
    OptimizerProfile,
    ParameterProfile,
    Rerun,
    Segment,
)
from lightning_osdp.errors import (
    ConfigurationError,
    InfeasibleError,
    OSDPError,
    PlanFormatError,
    PlanMismatchError,
    ProfileError,
    RanksApartError,
    ShardedParameterError,
    UntraceableError,
)
from lightning_osdp.machines import Device, Interconnect, Machine
from lightning_osdp.planner.cost import PeakMemory
from lightning_osdp.planner.engine import FSDP2, Event, Moment
from lightning_osdp.planner.scheduler import HandMade, PlanMethod, made_by_hand, make_plan
from lightning_osdp.planner.simulation import Interval, StepEstimate, simulate
from lightning_osdp.registration import register
from lightning_osdp.report.advice import Advice, advise
from lightning_osdp.report.alternatives import Alternative, Alternatives, find_alternatives
from lightning_osdp.report.cases import Case, Price, memory_price, what_if
from lightning_osdp.report.difference import Decided, Difference, compare_plans
from lightning_osdp.report.picture import draw_plan
from lightning_osdp.report.tables import render_plan
from lightning_osdp.report.trace import chrome_trace

if TYPE_CHECKING:
    from lightning_osdp.apply import apply_plan, change_plan
    from lightning_osdp.callbacks.peak import AllocatorPeaks
    from lightning_osdp.callbacks.plan_monitor import Measured, PlanMonitor
    from lightning_osdp.operations.loss import chunked_cross_entropy
    from lightning_osdp.profiler import ComputePrecision, Together, TrainingStep, measure_cluster, profile_model
    from lightning_osdp.strategy import OSDPPrecision, OSDPStrategy

__version__ = version("lightning-osdp")
_LATER = {
    "apply": ("apply_plan", "change_plan"),
    "callbacks.peak": ("AllocatorPeaks",),
    "callbacks.plan_monitor": ("Measured", "PlanMonitor"),
    "operations.loss": ("chunked_cross_entropy",),
    "profiler": ("ComputePrecision", "Together", "TrainingStep", "measure_cluster", "profile_model"),
    "strategy": ("OSDPPrecision", "OSDPStrategy"),
}
"""Module that imports torch -> public names that it defines."""

register()


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            globals()[name] = value = getattr(import_module(f"{__name__}.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "FSDP2",
    "Advice",
    "Affine",
    "AllocatorPeaks",
    "Alternative",
    "Alternatives",
    "BatchPolicy",
    "Block",
    "BlockProfile",
    "Case",
    "Cluster",
    "ComputePrecision",
    "ConfigurationError",
    "Contention",
    "Correction",
    "Cost",
    "Crossing",
    "Cut",
    "Decided",
    "Decision",
    "Device",
    "DeviceRates",
    "Difference",
    "Event",
    "Exchange",
    "HandMade",
    "InfeasibleError",
    "Interconnect",
    "Interval",
    "Level",
    "Link",
    "Links",
    "Machine",
    "Measured",
    "ModelProfile",
    "Moment",
    "OSDPError",
    "OSDPPrecision",
    "OSDPStrategy",
    "OperatorProfile",
    "OptimizerProfile",
    "Option",
    "ParameterProfile",
    "PeakMemory",
    "Plan",
    "PlanFormatError",
    "PlanMethod",
    "PlanMismatchError",
    "PlanMonitor",
    "Price",
    "ProfileError",
    "RanksApartError",
    "Rerun",
    "SearchSpace",
    "Segment",
    "ShardedParameterError",
    "StepEstimate",
    "Together",
    "TrainingStep",
    "Treatment",
    "Unit",
    "UnitOverhead",
    "UntraceableError",
    "advise",
    "apply_plan",
    "change_plan",
    "chrome_trace",
    "chunked_cross_entropy",
    "compare_plans",
    "draw_plan",
    "find_alternatives",
    "made_by_hand",
    "make_plan",
    "measure_cluster",
    "memory_price",
    "profile_model",
    "render_plan",
    "simulate",
    "what_if",
]
