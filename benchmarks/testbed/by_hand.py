"""OSDP's help on gloo, for those who train without it: its collectives, and all-gathers of units ahead."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_osdp.apply.internals import access, gathering, in_flight
from lightning_osdp.operations.gloo import AllGather
from lightning_osdp.operations.reduce_scatter import reduce_scatter


def scatter_in_flight(root: nn.Module) -> None:
    """Has units that somebody has put under ``fully_shard`` gather and reduce as OSDP's do."""
    access.begin(root)
    found = [access.group_of(unit) for unit in root.modules() if isinstance(unit, FSDPModule)]
    groups = [group for group in dict.fromkeys(found) if group is not None]
    for group in groups:
        group.modules[0].set_custom_all_gather(AllGather())
    in_flight.Reductions(root, groups)


def gather_ahead(root: nn.Module, units: Sequence[Any]) -> None:
    """Has units, given in forward order, gather the next one ahead, forward and backward; torch on CPU does not."""
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    gathering.set_asynchronous(root, is_asynchronous=True)


def waited_reduce_scatters() -> AbstractContextManager[Any]:
    """Replaces torch.distributed's reduce-scatter, within the context, by OSDP's, waited for: for Lightning's FSDP."""
    return patch.object(dist, "reduce_scatter_single", _reduce_scatter)


def _reduce_scatter(
    output: Tensor,
    input: Tensor,  # noqa: A002 -- torch calls it so
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    assert not async_op
    reduce_scatter(output, input, op=op, group=group)
