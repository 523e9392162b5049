"""A reduce-scatter that sends what a ring has to: gloo's own is an all-reduce inside and sends twice as much."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def ring_reduce_scatter(
    output: Tensor,
    input: Tensor,  # noqa: A002 -- torch calls it so
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """Adds up over ranks; each sends (N-1)/N of the whole tensor. Arguments are those of torch's.

    Args:
        output: this rank's shard, which is written; contiguous, 1/N of the whole tensor.
        input: summands of all shards in the order of ranks; it stays as it is.
        op: SUM or AVG.
        group: of the ranks.
        async_op: False; it returns when this rank has its shard.

    Raises:
        ValueError: another op, or ``async_op``.
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) or async_op:
        raise ValueError(f"Expected SUM or AVG that is waited for, got {op} and async_op={async_op}.")
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    shards = list(input.view(num_ranks, -1).unbind())
    received = output.view(-1)
    if num_ranks == 1:
        received.copy_(shards[0])
        return
    spare = torch.empty_like(received) if num_ranks > 2 else received
    sent = shards[(rank - 1) % num_ranks]
    for step in range(num_ranks - 1):
        # what comes last must come into the output
        into = received if (num_ranks - step) % 2 == 0 else spare
        sending = dist.isend(sent, group=group, group_dst=(rank + 1) % num_ranks)
        dist.recv(into, group=group, group_src=(rank - 1) % num_ranks)
        assert sending is not None
        sending.wait()
        sent = into.add_(shards[(rank - step - 2) % num_ranks])
    if op == dist.ReduceOp.AVG:
        received.div_(num_ranks)


class RingReduceScatter:
    """The same for ``set_custom_reduce_scatter`` of FSDP2's units, with the methods of torch's ``ReduceScatter``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What it reads or writes."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """See `ring_reduce_scatter`."""
        ring_reduce_scatter(output_tensor, input_tensor, op, group, async_op)


def use_ring(root: nn.Module) -> None:
    """Has the units of a module that somebody else has put under ``fully_shard`` reduce in a ring from now on."""
    ring: Any = RingReduceScatter()
    for unit in root.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_reduce_scatter(ring)


def ring_reduce_scatters() -> AbstractContextManager[Any]:
    """Within it, whoever takes torch.distributed's reduce-scatter takes this one: FSDP, who measures links."""
    return patch.object(dist, "reduce_scatter_single", ring_reduce_scatter)
