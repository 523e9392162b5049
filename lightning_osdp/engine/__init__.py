"""Engines: what FSDP does in a step, as data and pure functions.

`Engine` is what the rest of the planner asks; each engine has a folder of its own, and what they share stands beside
`engine.engine`.
"""

from __future__ import annotations

from dataclasses import fields

from lightning_osdp.core.plan import Plan
from lightning_osdp.engine.change import check_change
from lightning_osdp.engine.engine import AUTO, Engine
from lightning_osdp.engine.events import MOST_SIMULATED, Event, GatherRule
from lightning_osdp.engine.fsdp1 import FSDP1
from lightning_osdp.engine.fsdp2 import FSDP2
from lightning_osdp.engine.layout import Layout, UnitBytes
from lightning_osdp.engine.live_parts import LiveParts, Moment
from lightning_osdp.engine.order import leaving_order

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (FSDP1, FSDP2)}
"""By the name that a plan has for it."""

DEFAULT = FSDP1()
"""What runs a step where nothing else is said."""


def engine_of(plan: Plan) -> Engine:
    """The engine that a plan is for, with the plan's settings."""
    kind = ENGINES[plan.engine]
    return kind(**{field.name: getattr(plan, field.name) for field in fields(kind)})


__all__ = [
    "AUTO",
    "DEFAULT",
    "ENGINES",
    "FSDP1",
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
