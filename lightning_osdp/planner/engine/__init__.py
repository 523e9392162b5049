"""Model of a step of `fully_shard`, as data and pure functions: the one thing that the rest of the planner asks."""

from __future__ import annotations

from lightning_osdp.planner.engine.blocks import (
    freed_bytes,
    in_modes,
    moving_activations,
    stays_bytes,
    with_activations,
)
from lightning_osdp.planner.engine.change import FLIPS, check_change
from lightning_osdp.planner.engine.effects import (
    FREED,
    KEPT,
    SAVING,
    Effects,
    block_effects,
    effects_in,
    effects_of,
    num_all_gathers,
)
from lightning_osdp.planner.engine.events import (
    COLLECTIVES,
    COPY,
    EXCHANGES,
    GATHERS,
    HOLDING_UP,
    OVERHEAD,
    REDUCTIONS,
    Collective,
    Event,
)
from lightning_osdp.planner.engine.exchanges import evaluation_beside, messages, saved_beyond
from lightning_osdp.planner.engine.fsdp2 import AUTO, DEFAULT, FSDP2, engine_of, num_shards, planned_collectives
from lightning_osdp.planner.engine.live_parts import BLOCKS_IN_FLIGHT, REDUCTIONS_IN_FLIGHT, Moment, in_flight_bytes
from lightning_osdp.planner.engine.schedule import MOST_SIMULATED, leaving_order

__all__ = [
    "AUTO",
    "BLOCKS_IN_FLIGHT",
    "COLLECTIVES",
    "COPY",
    "DEFAULT",
    "EXCHANGES",
    "FLIPS",
    "FREED",
    "FSDP2",
    "GATHERS",
    "HOLDING_UP",
    "KEPT",
    "MOST_SIMULATED",
    "OVERHEAD",
    "REDUCTIONS",
    "REDUCTIONS_IN_FLIGHT",
    "SAVING",
    "Collective",
    "Effects",
    "Event",
    "Moment",
    "block_effects",
    "check_change",
    "effects_in",
    "effects_of",
    "engine_of",
    "evaluation_beside",
    "freed_bytes",
    "in_flight_bytes",
    "in_modes",
    "leaving_order",
    "messages",
    "moving_activations",
    "num_all_gathers",
    "num_shards",
    "planned_collectives",
    "saved_beyond",
    "stays_bytes",
    "with_activations",
]
