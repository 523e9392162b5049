"""Sharding modes as data: which collectives each one issues, and what it keeps whole."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ShardingMode:
    """How one unit's parameters and gradients are treated within an optimizer step (OSDP, figure 1).

    In every mode parameters, reduced gradients and optimizer state are sharded *between* optimizer steps; modes
    differ in over which ranks, in how long the gathered parameter and the unsharded gradient live, and in the
    collectives that this takes.
    """

    name: str
    resident: bool
    """Whether the gathered parameter stays whole from the unit's forward to the end of its backward."""
    backward_all_gathers: int
    """All-gathers of the unit's parameters in one backward."""
    sync: str = "every"
    """Which micro-batches reduce gradients: one of `SYNC_CHOICES`. Where only the last one does, the unsharded gradient
    lives from the first one on, and so does the gathered parameter of a resident unit."""
    activations: str = "keep"
    """How the unit's block treats tensors that it saves for backward: one of `ACTIVATION_CHOICES`."""
    regathers_over: str = "all"
    """Over which ranks it is gathered again once forward has freed it: ``all``, or those of a ``node``. In each node
    forward then leaves a shard, unless it is sharded there anyway."""
    sharded_over: str = "all"
    """Over which ranks it is sharded between steps: ``all``, or those of a ``node``. Each node then has all of it;
    gradients are reduced and scattered in the node, and what a rank gets of them is all-reduced between nodes."""

    def __hash__(self) -> int:  # searches look modes up all the time, and these fields tell them apart
        return hash((self.name, self.sync, self.activations))

    @property
    def needs_nodes(self) -> bool:
        """Whether it is of use on several nodes with several ranks each only."""
        return "node" in {self.regathers_over, self.sharded_over}

    @property
    def leaves_shard(self) -> bool:
        """Whether forward leaves a shard of it in each node."""
        return self.regathers_over == "node" and self.sharded_over == "all" and not self.resident

    @property
    def over_all(self) -> ShardingMode:
        """The mode in its place where there are no nodes: `DP` or `ZDP` with the same ``sync`` and ``activations``."""
        plain, sync = DP if self.resident else ZDP, "every" if self.sync == "node" else self.sync
        return replace(plain, sync=sync, activations=self.activations) if self.needs_nodes else self


ZDP = ShardingMode("ZDP", resident=False, backward_all_gathers=1)
"""Freed after forward, gathered again for backward: ``FULL_SHARD`` or ``reshard_after_forward=True``."""

DP = ShardingMode("DP", resident=True, backward_all_gathers=0)
"""Gathered once, kept from forward to the end of its backward: ``SHARD_GRAD_OP`` or ``reshard_after_forward=False``."""

HPZ = ShardingMode("hpZ", resident=False, backward_all_gathers=1, regathers_over="node")
"""Freed after forward but for a shard in each node, from which backward gathers without the network between nodes:
ZeRO++'s secondary partition, or ``reshard_after_forward=<ranks of a node>``."""

HSDP = ShardingMode("HSDP", resident=False, backward_all_gathers=1, regathers_over="node", sharded_over="node")
"""As ZDP among the ranks of a node, replicated across nodes: ``HYBRID_SHARD``, or ``fully_shard`` on a mesh of nodes
and ranks of a node."""

HDP = ShardingMode("HDP", resident=True, backward_all_gathers=0, regathers_over="node", sharded_over="node")
"""As DP among the ranks of a node, replicated across nodes: ``_HYBRID_SHARD_ZERO2``."""

NAMED_MODES = {mode.name: mode for mode in (ZDP, HPZ, DP, HSDP, HDP)}
"""Every mode by name, in the order in which it is offered to the search: of those that are sharded over the same ranks,
the one with the least memory first."""

MODES = {name: mode for name, mode in NAMED_MODES.items() if not mode.needs_nodes}
"""Those that there are on any cluster, in the same order."""


def freed_and_kept(mode: ShardingMode) -> tuple[ShardingMode, ShardingMode]:
    """Two modes that shard over the same ranks: one that frees a unit after forward, and one that keeps it."""
    return (HSDP, HDP) if mode.sharded_over == "node" else (ZDP, DP)


SYNC_CHOICES = ("every", "last", "node")
"""Which micro-batches reduce gradients: all of them; the last one; or, of a unit that is sharded in the node, all of
them inside of nodes and the last one between them (``set_requires_all_reduce``)."""

ACTIVATION_CHOICES = ("keep", "recompute", "offload", "recompute_offload")
"""What becomes of the tensors that a block saves for backward: they are kept; dropped, and made again by running the
block's forward in backward; moved to host memory and back; or dropped, with the block's inputs on the host."""


def modes_of(names: Collection[str] = tuple(MODES), sync: Collection[str] = SYNC_CHOICES) -> tuple[ShardingMode, ...]:
    """Modes of these names, with each of these choices of micro-batches that reduce; least memory first."""
    return tuple(
        replace(mode, sync=each)
        for each in SYNC_CHOICES
        if each in sync
        for mode in NAMED_MODES.values()
        if mode.name in names and (each != "node" or mode.sharded_over == "node")
    )


ALL_MODES = modes_of()
"""Each of `MODES` with every choice of micro-batches that reduce."""
