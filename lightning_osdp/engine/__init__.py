"""What `fully_shard` does in a step, as data and pure functions: the one thing that the rest of the planner asks."""

from __future__ import annotations

from lightning_osdp.engine.change import FLIPS, check_change
from lightning_osdp.engine.fsdp2 import AUTO, DEFAULT, FSDP2, engine_of
from lightning_osdp.engine.layout import UnitBytes
from lightning_osdp.engine.live_parts import Moment
from lightning_osdp.engine.schedule import MOST_SIMULATED, Event, GatherRule, leaving_order

__all__ = [
    "AUTO",
    "DEFAULT",
    "FLIPS",
    "FSDP2",
    "MOST_SIMULATED",
    "Event",
    "GatherRule",
    "Moment",
    "UnitBytes",
    "check_change",
    "engine_of",
    "leaving_order",
]
