"""A process group of which one rank exists: it copies what that rank has, and waits as long as links would take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

_SPIN_S = 3e-4
"""The end of a wait is spun through: a sleeping process comes back late by about this much."""


def _no_time(num_bytes: int) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class SimulatedLinks:
    """Seconds of each collective by the bytes of the whole tensor, and what the backend in mind allocates."""

    all_gather_s: Callable[[int], float] = _no_time
    reduce_scatter_s: Callable[[int], float] = _no_time
    all_reduce_s: Callable[[int], float] = _no_time
    copies_reduced: bool = False
    """True where a reduce-scatter copies its whole input first, as gloo's does."""


class _Done(dist.Work):
    """A collective that is over at a moment of ``time.perf_counter``."""

    def __init__(self, end_s: float, result: list[Tensor], copied: Tensor | None = None) -> None:
        super().__init__()
        self._end_s, self._copied = end_s, copied
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(result)

    @override
    def wait(self, timeout: Any = None) -> bool:
        remaining_s = self._end_s - time.perf_counter()
        if remaining_s > _SPIN_S:
            time.sleep(remaining_s - _SPIN_S)
        while time.perf_counter() < self._end_s:
            pass
        self._copied = None
        return True

    @override
    def is_completed(self) -> bool:
        return time.perf_counter() >= self._end_s

    @override
    def get_future(self) -> Any:
        return self._future


class SimulatedGroup(dist.ProcessGroup):
    """Rank 0 of N, with the collectives of FSDP and DDP; all others are taken to hold what rank 0 holds.

    Collectives follow each other on one link, as on one communicator.
    """

    def __init__(self, rank: int, size: int, links: SimulatedLinks) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # a group without backends of its own
        self.links = links
        self.simulated_s = 0.0
        """Seconds that collectives have taken so far."""
        self._rank, self._size, self._free_s = rank, size, 0.0

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Name of the backend, as ``torch.distributed.get_backend`` tells it."""
        return "simulated"

    @property
    def group_name(self) -> dist.GroupName:
        """Name by which a mesh finds the group. torch keeps such names in backends, of which this group has none."""
        name: dist.GroupName = dist.distributed_c10d._world.pg_names[self]
        return name

    def _times(self, opts: Any) -> int:
        """Factor that a reduction over equal ranks puts on one's values: their sum is N times as large.

        ``fully_shard`` reduces with AVG, and with SUM over what it has divided where values may overflow.
        """
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        if op == dist.ReduceOp.SUM:
            return self._size
        # not ``in``, which compares from the other side: of the kinds none is equal to an operation
        if any(op == kind for kind in (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)):
            return 1
        raise ValueError(f"Expected SUM, AVG, MIN or MAX, got {op}.")

    def _done(self, seconds: float, result: Sequence[Tensor], copied: Tensor | None = None) -> _Done:
        self._free_s = max(time.perf_counter(), self._free_s) + seconds
        self.simulated_s += seconds
        return _Done(self._free_s, list(result), copied)

    def allgather(  # type: ignore[override]  # one of its overloads, the one that torch.distributed calls
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> _Done:
        """``torch.distributed.all_gather``."""
        for output in outputs[0]:
            output.copy_(inputs[0])
        return self._done(self.links.all_gather_s(sum(output.nbytes for output in outputs[0])), outputs[0])

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        """``torch.distributed.all_gather_single``."""
        output.view(self._size, -1).copy_(source.view(1, -1).expand(self._size, -1))
        return self._done(self.links.all_gather_s(output.nbytes), [output])

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> _Done:
        """``torch.distributed.reduce_scatter_single``: this rank's part of the input, as often as ranks add it."""
        times = self._times(opts)
        copied = source.clone() if self.links.copies_reduced else None
        output.copy_(source.view(self._size, -1)[self._rank].view_as(output)).mul_(times)
        return self._done(self.links.reduce_scatter_s(source.nbytes), [output], copied)

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> _Done:
        """``torch.distributed.all_to_all_single`` of equal parts, of which all ranks have this rank's."""
        output.view(self._size, -1).copy_(source.view(self._size, -1)[self._rank].expand(self._size, -1))
        return self._done(self.links.reduce_scatter_s(source.nbytes), [output])

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        """``torch.distributed.all_reduce``."""
        times = self._times(opts)
        for tensor in tensors:
            tensor.mul_(times)
        return self._done(self.links.all_reduce_s(sum(tensor.nbytes for tensor in tensors)), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        """``torch.distributed.broadcast``, from rank 0, which has the values already; it takes no time."""
        return self._done(0.0, tensors)

    def barrier(self, opts: Any = None) -> _Done:
        """``torch.distributed.barrier``; it takes no time."""
        return self._done(0.0, [])

    # Names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
