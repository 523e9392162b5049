"""A reduce-scatter for gloo that sends what it has to, and that computing can go on beside.

Each rank gets all summands of its shard by an all-to-all, which sends (N-1)/N of the whole tensor, and adds them up.
Gloo's own is an all-reduce inside: it sends twice as much, and returns when it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.operations.gloo import begin_all_to_all


def can_add_up(op: Any) -> bool:
    """Tells if `add_up` knows the operation: SUM or AVG."""
    return op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def add_up(shard: Tensor, received: Tensor, op: Any) -> None:
    """Writes the sum over ranks of summands that an all-to-all has received, or their mean, to this rank's shard."""
    torch.sum(received.view(-1, shard.numel()), 0, out=shard.view(-1))
    if op == dist.ReduceOp.AVG:
        shard.div_(received.numel() // shard.numel())


def reduce_scatter(
    shard: Tensor, whole: Tensor, *, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> None:
    """Scatters and adds up, and returns when the shard is there."""
    received = torch.empty_like(whole)
    begin_all_to_all(received, whole, group).wait()
    add_up(shard, received, op)


class ReduceScatter:
    """`reduce_scatter` with the methods of torch's ``ReduceScatter``, for ``set_custom_reduce_scatter()``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates the input or the output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """Reduces the input, and returns when the output is there."""
        reduce_scatter(output_tensor, input_tensor, op=op, group=group)
