"""Exchanges of activations between ranks whose operator each has a part of, with gradients.

Each rank has samples of its own, as in data parallelism: rows of a matrix with one column for each feature. Ranks may
have different numbers of rows. Where each rank has all features of its rows, a collective brings it one of these:

==============  ===================================================  ==============================
function        what a rank gets                                     backward
==============  ===================================================  ==============================
`gather`        all features of the rows of all ranks                sums over ranks of own rows
`sum_up`        sums over ranks of all features of its own rows      gathers the rows of all ranks
`to_samples`    all features of its own rows, from parts of ranks    its part of all ranks' rows
`to_features`   its part of the features of the rows of all ranks    all features of its own rows
==============  ===================================================  ==============================

Sums are over ranks in their order, so they are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_osdp.operations.gloo import all_gather, begin_all_to_all
from lightning_osdp.operations.stationary.waiting import WaitingOutputs

MOVE_WEIGHTS = (
    "To have operators that move activations move weights instead, plan anew with SearchSpace(modes=('ZDP', 'DP'))."
)
"""Last sentence of errors about such operators."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an operator, which all ranks make at a time."""

    group: dist.ProcessGroup
    rank: int
    rows: tuple[int, ...]
    """Number of rows that each rank has."""
    before_backward: Callable[[bool, int], object]
    """Called on each rank before each exchange in backward, with True if ranks have agreed that all come to it, and the
    number of the output that backward has come to; 0: it has none."""
    on_function: Callable[[int], object] = lambda _: None
    """Called on each rank with a number for each function of what is between, and what it is given, see `Between`."""
    outputs: WaitingOutputs = field(default_factory=WaitingOutputs)
    """Has the outputs of exchanges until backward comes to them."""
    have_gathered: bool = False
    """True if all ranks have the rows of all already, by one gather for another operator."""
    are_alike: bool = False
    """True if the inputs of all ranks have one shape."""


def is_in_torch_func() -> bool:
    """Tells if a function runs that ``torch.func`` transforms: exchanges cannot be part of one."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def part_sizes(total: int, num_ranks: int) -> list[int]:
    """Sizes of the parts that ranks have of so many rows or columns, as ``torch.chunk`` and ``fully_shard`` cut.

    Example:
        >>> part_sizes(5, 4)
        [2, 2, 1, 0]
    """
    size = -(-total // num_ranks)
    return [max(0, min(size, total - rank * size)) for rank in range(num_ranks)]


def gather(rows: Tensor, call: Call) -> Tensor:
    """Rows of all ranks, (sum of rows, features), from those of each rank, (rows, features)."""
    return _exchange(rows, call, _gathered, _summed)


def sum_up(summands: Tensor, call: Call) -> Tensor:
    """Sums over ranks of own rows, (rows, features), from summands for the rows of all, (sum of rows, features)."""
    return _exchange(summands, call, _summed, _gathered)


def to_samples(part: Tensor, call: Call, num_features: int) -> Tensor:
    """All features of own rows, (rows, features), from a part of those of all rows, (sum of rows, part of features)."""
    sizes = part_sizes(num_features, len(call.rows))
    forward, backward = partial(_to_samples, sizes=sizes), partial(_to_features, sizes=sizes)
    return _exchange(part, call, forward, backward)


def to_features(rows: Tensor, call: Call) -> Tensor:
    """Part of the features of all rows, (sum of rows, part of features), from all of own rows, (rows, features)."""
    sizes = part_sizes(rows.shape[-1], len(call.rows))
    forward, backward = partial(_to_features, sizes=sizes), partial(_to_samples, sizes=sizes)
    return _exchange(rows, call, forward, backward)


def own_part(parameter: DTensor, sum_between: Callable[[Tensor], Tensor]) -> Tensor:
    """This rank's part of a parameter that is cut over the ranks of the last dimension of a mesh.

    Its gradient has been through the samples of all of these, each of which has a loss that is a mean of its own
    samples: it is divided by the number of ranks of the mesh, which gives the mean over ranks, as under DDP, once
    ``sum_between`` has added what ranks with the same part have.
    """
    return _OwnPart.apply(parameter, sum_between)  # type: ignore[no-untyped-call,no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, given: Tensor, call: Call, there: Callable[..., Tensor], back: Callable[..., Tensor]
    ) -> Tensor:
        ctx.call, ctx.there, ctx.back = call, there, back
        return there(given, call)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.call.before_backward(ctx.call.outputs.is_agreed(ctx.number), ctx.number or 0)
        # both ways are linear, each the gradient of the other: a slope may be asked for, and learnt from
        return _exchange(gradient, ctx.call, ctx.back, ctx.there), None, None, None


def _exchange(given: Tensor, call: Call, there: Callable[..., Tensor], back: Callable[..., Tensor]) -> Tensor:
    found: Tensor = _Exchange.apply(given, call, there, back)  # type: ignore[no-untyped-call]
    number, node = call.outputs.add([found]), cast("Any", found.grad_fn)
    if node is not None:
        node.number = number  # of its context
    return found


class _OwnPart(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, parameter: DTensor, sum_between: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.parameter, ctx.sum_between = parameter, sum_between
        own = parameter.to_local()
        return own.view_as(own)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor, None]:
        mesh: DeviceMesh = ctx.parameter.device_mesh
        found = DTensor.from_local(
            ctx.sum_between(gradient.div(mesh.size()).contiguous()),
            mesh,
            ctx.parameter.placements,
            shape=ctx.parameter.shape,
            stride=ctx.parameter.stride(),
        )
        return found, None


def _gathered(rows: Tensor, call: Call) -> Tensor:
    if len(call.rows) == 1:
        return rows.contiguous()
    most, total = max(call.rows), sum(call.rows)
    own = rows.contiguous()
    if len(own) < most:
        own = torch.cat([own, own.new_zeros(most - len(own), own.shape[1])])
    whole = own.new_empty(most * len(call.rows), own.shape[1])
    all_gather(whole, own, call.group)
    if total == len(whole):
        return whole
    return torch.cat([each[:num_rows] for each, num_rows in zip(whole.split(most), call.rows, strict=True)])


def _summed(summands: Tensor, call: Call) -> Tensor:
    if len(call.rows) == 1:
        return summands.contiguous()
    num_features = summands.shape[1]
    own = call.rows[call.rank] * num_features
    received = _exchanged(
        summands.reshape(-1), [num_rows * num_features for num_rows in call.rows], [own] * len(call.rows), call
    )
    return received.view(len(call.rows), call.rows[call.rank], num_features).sum(0)


def _to_samples(part: Tensor, call: Call, *, sizes: Sequence[int]) -> Tensor:
    if len(call.rows) == 1:
        return part.contiguous()
    num_rows, own_size = call.rows[call.rank], sizes[call.rank]
    received = _exchanged(
        part.reshape(-1), [each * own_size for each in call.rows], [num_rows * size for size in sizes], call
    )
    parts = received.split([num_rows * size for size in sizes])
    return torch.cat([each.view(num_rows, size) for each, size in zip(parts, sizes, strict=True)], 1)


def _to_features(rows: Tensor, call: Call, *, sizes: Sequence[int]) -> Tensor:
    if len(call.rows) == 1:
        return rows.contiguous()
    own_size = sizes[call.rank]
    flat = torch.cat([each.reshape(-1) for each in rows.split(list(sizes), 1)])
    received = _exchanged(
        flat, [len(rows) * size for size in sizes], [num_rows * own_size for num_rows in call.rows], call
    )
    return received.view(sum(call.rows), own_size)


def _exchanged(flat: Tensor, given: list[int], got: list[int], call: Call) -> Tensor:
    """Elements from all ranks, by rank, for elements to all ranks; ``given`` and ``got`` are their numbers."""
    received = flat.new_empty(sum(got))
    begin_all_to_all(received, flat.contiguous(), call.group, got=got, given=given).wait()
    return received
