"""A plan made real: the module sharded by an engine, and its states."""

from __future__ import annotations

from lightning_osdp.apply.activations import apply_activations, is_inside, remove_activations, with_recomputed
from lightning_osdp.apply.change import change_plan
from lightning_osdp.apply.children import called_children
from lightning_osdp.apply.engines import ENGINES, apply_plan
from lightning_osdp.apply.fsdp1.accumulate import units_reduced_last, without_reducing
from lightning_osdp.apply.fsdp1.state_dict import full_state
from lightning_osdp.apply.fsdp1.wrap import forget_zeroed_gradients
from lightning_osdp.apply.fsdp2.internals import local
from lightning_osdp.apply.materialize import check_initializable
from lightning_osdp.apply.sharded import ShardedModel
from lightning_osdp.apply.sharded_checkpoint import check_number

__all__ = [
    "ENGINES",
    "ShardedModel",
    "apply_activations",
    "apply_plan",
    "called_children",
    "change_plan",
    "check_initializable",
    "check_number",
    "forget_zeroed_gradients",
    "full_state",
    "is_inside",
    "local",
    "remove_activations",
    "units_reduced_last",
    "with_recomputed",
    "without_reducing",
]
