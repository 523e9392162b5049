"""Applying a plan: the module sharded by `fully_shard`, and its states."""

from __future__ import annotations

from lightning_osdp.apply.internals.access import do_nothing
from lightning_osdp.apply.internals.dtensors import local, num_copies
from lightning_osdp.apply.internals.gathering import whole_storages
from lightning_osdp.apply.internals.sharding import refuse_copy
from lightning_osdp.apply.plan import apply_plan, change_plan, fully_shard_arguments
from lightning_osdp.apply.preparing.initialize import check_initializable
from lightning_osdp.apply.preparing.prepare import executed
from lightning_osdp.apply.ranks.hosts import new_host_group, reaches_hosts
from lightning_osdp.apply.sharded import ShardedModel, host_rows_of, sharded_as
from lightning_osdp.apply.states.state import check_number
from lightning_osdp.apply.states.stored import StoredShards
from lightning_osdp.apply.units import NODE_GROUPS, ONE_MESH, called_children

__all__ = [
    "NODE_GROUPS",
    "ONE_MESH",
    "ShardedModel",
    "StoredShards",
    "apply_plan",
    "called_children",
    "change_plan",
    "check_initializable",
    "check_number",
    "do_nothing",
    "executed",
    "fully_shard_arguments",
    "host_rows_of",
    "local",
    "new_host_group",
    "num_copies",
    "reaches_hosts",
    "refuse_copy",
    "sharded_as",
    "whole_storages",
]
