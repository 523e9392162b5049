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
    """Whether a reduce-scatter copies its whole input first, as gloo's does."""


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
    """Rank 0 of N, with the collectives of sharded training; all others are taken to hold what rank 0 holds.

    Collectives follow each other on one link, as on one communicator.

    Args:
        rank: of this process.
        size: N.
        links: how long collectives take.
        name: that torch registers it by.
    """

    def __init__(self, rank: int, size: int, links: SimulatedLinks, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # a group without backends of its own
        self.links = links
        self.simulated_s = 0.0
        """Seconds that collectives have taken so far."""
        self._rank, self._size, self._name, self._free_s = rank, size, name, 0.0

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """As ``torch.distributed.get_backend`` tells."""
        return "simulated"

    def getGroupName(self) -> str:  # noqa: N802  # torch's name
        """By which a mesh of devices finds it: torch keeps no name of a group without backends."""
        return self._name

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
        """``torch.distributed.reduce_scatter_single``: the sum over ranks is N times what rank 0 has."""
        copied = source.clone() if self.links.copies_reduced else None
        output.copy_(source.view(self._size, -1)[self._rank].view_as(output)).mul_(self._size)
        return self._done(self.links.reduce_scatter_s(source.nbytes), [output], copied)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        """``torch.distributed.all_reduce``; a minimum or maximum over equal ranks changes nothing."""
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._size)
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
