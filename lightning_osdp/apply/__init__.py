"""A plan made real: the module sharded by `fully_shard`, and its states."""

from __future__ import annotations

from lightning_osdp.apply.activations.blocks import apply_activations, is_inside, remove_activations, with_recomputed
from lightning_osdp.apply.children import called_children
from lightning_osdp.apply.fsdp2.arguments import fully_shard_arguments
from lightning_osdp.apply.fsdp2.internals import local, refuse_copy
from lightning_osdp.apply.materialize import check_initializable
from lightning_osdp.apply.plan import apply_plan, change_plan
from lightning_osdp.apply.sharded import ShardedModel
from lightning_osdp.apply.sharded_checkpoint import check_number

__all__ = [
    "ShardedModel",
    "apply_activations",
    "apply_plan",
    "called_children",
    "change_plan",
    "check_initializable",
    "check_number",
    "fully_shard_arguments",
    "is_inside",
    "local",
    "refuse_copy",
    "remove_activations",
    "with_recomputed",
]
