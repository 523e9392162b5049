"""Operators cut into slices that are gathered one after the other; the model's numbers and names stay."""

from __future__ import annotations

from lightning_osdp.operations.splitting.module import (
    Cut,
    SplitModule,
    cut_states,
    cuts_of,
    join_names,
    join_states,
    parameter_like,
)
from lightning_osdp.operations.splitting.sharded import JoinedShards, cut_of, gathered
from lightning_osdp.operations.splitting.splitters import (
    BY_OUTPUTS,
    class_name,
    compiled,
    compiled_whole,
    compiler_of,
    cut_dims,
    inside_compiled,
    split,
    splittable,
)

__all__ = [
    "BY_OUTPUTS",
    "Cut",
    "JoinedShards",
    "SplitModule",
    "class_name",
    "compiled",
    "compiled_whole",
    "compiler_of",
    "cut_dims",
    "cut_of",
    "cut_states",
    "cuts_of",
    "gathered",
    "inside_compiled",
    "join_names",
    "join_states",
    "parameter_like",
    "split",
    "splittable",
]
