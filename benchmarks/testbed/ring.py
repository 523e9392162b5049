"""A reduce-scatter that sends what a ring has to: gloo's own is an all-reduce inside and sends twice as much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

_NAMES = ("reduce_scatter_single", "reduce_scatter_tensor")
"""In torch.distributed, the second before torch 2.13."""


def ring_reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sums over ranks; each sends (N-1)/N of the whole tensor. Of torch's arguments, those that FSDP1 gives.

    Args:
        output: this rank's shard, which is written; contiguous, 1/N of the whole tensor.
        whole: summands of all shards in the order of ranks; it stays as it is.
        group: all ranks.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    shards = list(whole.view(num_ranks, -1).unbind())
    received = output.view(-1)
    if num_ranks == 1:
        received.copy_(shards[0])
        return
    spare = torch.empty_like(received) if num_ranks > 2 else received
    sent = shards[(rank - 1) % num_ranks]
    for step in range(num_ranks - 1):
        # what comes last must come into the output
        into = received if (num_ranks - step) % 2 == 0 else spare
        sending = dist.isend(sent, (rank + 1) % num_ranks, group=group)
        dist.recv(into, (rank - 1) % num_ranks, group=group)
        assert sending is not None
        sending.wait()
        sent = into.add_(shards[(rank - step - 2) % num_ranks])


@contextmanager
def ring_reduce_scatters() -> Iterator[None]:
    """Within it, whoever takes torch.distributed's reduce-scatter takes this one: FSDP1, and who measures links."""
    replaced = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}
    for name in replaced:
        setattr(dist, name, ring_reduce_scatter)
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(dist, name, function)
