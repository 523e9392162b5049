"""Operators cut into slices that are gathered one after the other; the model's numbers and names stay."""

from __future__ import annotations

from lightning_osdp.splitting.compiled import compiled_whole
from lightning_osdp.splitting.joined import JoinedShards, gathered
from lightning_osdp.splitting.module import SplitModule
from lightning_osdp.splitting.splitters import SPLITTERS, cut_dims, num_features, split, splittable
from lightning_osdp.splitting.states import cut_states, cuts_of, join_names, join_states

__all__ = [
    "SPLITTERS",
    "JoinedShards",
    "SplitModule",
    "compiled_whole",
    "cut_dims",
    "cut_states",
    "cuts_of",
    "gathered",
    "join_names",
    "join_states",
    "num_features",
    "split",
    "splittable",
]
