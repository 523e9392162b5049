"""Which ranks are on one node."""

from __future__ import annotations

import os

from lightning.pytorch.strategies import FSDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.runtime.all_ranks import from_all_ranks


def ranks_of_node(strategy: FSDPStrategy, wanted: int | None) -> int | None:
    """How many ranks each node has, all of which follow each other; None where all are on one. Call it on all ranks.

    Where nodes have different numbers of ranks, or ranks go round them in turn, there are no nodes to plan for: that is
    said, and all ranks count as one node. Ranks of this node are as many as ``LOCAL_WORLD_SIZE`` says, else as the
    Trainer's ``devices``, unless the user has ``wanted`` another number.

    Raises:
        ConfigurationError: the ranks cannot be divided into nodes of so many.
    """
    world_size = strategy.world_size
    if wanted is not None:
        if world_size % wanted:
            raise ConfigurationError(
                f"Expected a node_size that divides the {world_size} ranks, got {wanted}. Leave it out, and it is what"
                " the ranks were started with."
            )
        return wanted if wanted < world_size else None
    assert strategy.cluster_environment is not None
    size = int(os.environ.get("LOCAL_WORLD_SIZE") or strategy.num_processes)
    if size >= world_size:
        return None
    told = from_all_ranks((size, strategy.cluster_environment.local_rank()))
    if any(each != (size, rank % size) for rank, each in enumerate(told)) or world_size % size:
        rank_zero_warn(
            f"OSDP: plans are made as if all ranks were on one node, for nodes do not have equally many ranks that"
            f" follow each other: ranks of the node and place in it, by rank, are {told}. Start ranks node by node, or"
            " pass node_size."
        )
        return None
    return size
