"""Who is drawn of those that train on nodes, for `benchmarks.pictures.headline`."""

from __future__ import annotations

from benchmarks.measures.beside_fsdp.baselines import BASE, SHARD_GRAD_OP
from benchmarks.measures.beside_fsdp.headline import CHECKPOINTING, DDP
from benchmarks.measures.beside_fsdp.nodes import HPZ, HYBRID, HYBRID_CHECKPOINTING, HYBRID_ZERO2, OVER_ALL

COLOURS = {
    BASE.name: "#000000",
    CHECKPOINTING.name: "#777777",
    SHARD_GRAD_OP.name: "#56B4E9",
    HPZ.name: "#0072B2",
    HYBRID.name: "#009E73",
    HYBRID_CHECKPOINTING.name: "#A6DBA0",
    HYBRID_ZERO2.name: "#CC79A7",
    DDP.name: "#F0E442",
    OVER_ALL: "#E69F00",
    "OSDP": "#D55E00",
}
