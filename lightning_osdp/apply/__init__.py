"""A plan made real: the module wrapped in FSDP units, and its state dicts."""

from __future__ import annotations

from lightning_osdp.apply.accumulate import reduce_left_over, units_reduced_last, without_reducing
from lightning_osdp.apply.materialize import check_initializable
from lightning_osdp.apply.optimizer_state import load_state, named_state, numbered
from lightning_osdp.apply.state_dict import full_state, sharded_state
from lightning_osdp.apply.unwrap import free_gathered, unwrap_whole
from lightning_osdp.apply.wrap import apply_plan, forget_zeroed_gradients, wrap_whole

__all__ = [
    "apply_plan",
    "check_initializable",
    "forget_zeroed_gradients",
    "free_gathered",
    "full_state",
    "load_state",
    "named_state",
    "numbered",
    "reduce_left_over",
    "sharded_state",
    "units_reduced_last",
    "unwrap_whole",
    "without_reducing",
    "wrap_whole",
]
