"""What `fully_shard` does in a step, as data and pure functions: the one thing that the rest of the planner asks."""

from __future__ import annotations

from dataclasses import fields

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.engine.change import FLIPS, check_change
from lightning_osdp.engine.engine import AUTO, Engine
from lightning_osdp.engine.events import MOST_SIMULATED, Event, GatherRule
from lightning_osdp.engine.fsdp2 import FSDP2
from lightning_osdp.engine.layout import Layout, UnitBytes
from lightning_osdp.engine.live_parts import LiveParts, Moment
from lightning_osdp.engine.order import leaving_order

DEFAULT = FSDP2()
"""What runs a step where nothing else is said."""


def engine_of(plan: Plan) -> FSDP2:
    """The engine with a plan's settings."""
    return FSDP2(**{field.name: getattr(plan, field.name) for field in fields(FSDP2)})


__all__ = [
    "AUTO",
    "DEFAULT",
    "FLIPS",
    "FSDP2",
    "MOST_SIMULATED",
    "Engine",
    "Event",
    "GatherRule",
    "Layout",
    "LiveParts",
    "Moment",
    "UnitBytes",
    "check_change",
    "engine_of",
    "leaving_order",
]
