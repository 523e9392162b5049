"""A plan made real: the module wrapped in FSDP units, and its state dicts."""

from __future__ import annotations

from lightning_osdp.apply.accumulate import reduce_left_over, units_reduced_last, without_reducing
from lightning_osdp.apply.activations import apply_activations, remove_activations
from lightning_osdp.apply.alone import alone, flat_parameters, kept_shards, shard_gradients
from lightning_osdp.apply.materialize import check_initializable
from lightning_osdp.apply.optimizer_state import load_state, named_state, numbered
from lightning_osdp.apply.separate import wrap_separately
from lightning_osdp.apply.sharded_checkpoint import check_number, read_optimizers
from lightning_osdp.apply.state_dict import full_state, sharded_state
from lightning_osdp.apply.units import place_in_step, use_modes
from lightning_osdp.apply.unwrap import free_gathered, unwrap_whole
from lightning_osdp.apply.wrap import apply_plan, forget_zeroed_gradients, wrap_whole

__all__ = [
    "alone",
    "apply_activations",
    "apply_plan",
    "check_initializable",
    "check_number",
    "flat_parameters",
    "forget_zeroed_gradients",
    "free_gathered",
    "full_state",
    "kept_shards",
    "load_state",
    "named_state",
    "numbered",
    "place_in_step",
    "read_optimizers",
    "reduce_left_over",
    "remove_activations",
    "shard_gradients",
    "sharded_state",
    "units_reduced_last",
    "unwrap_whole",
    "use_modes",
    "without_reducing",
    "wrap_separately",
    "wrap_whole",
]
