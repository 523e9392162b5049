"""All-gathers and all-to-alls for gloo that send and receive at the same time.

Gloo's own give a connection data to send before they tell the peer there that it may send, too. Data of a rank that
comes later so goes first, and its peer's waits behind it: a connection that is used both ways has one direction at a
time. Here all receives are posted before anything is sent, where messages are not small. On links that bind, an
all-to-all of shards of 1 MiB took 0.52 of the time of gloo's between two ranks and 0.65 among four, and an all-gather
0.69 between two. [Measured: ``docs/research/measured/measuring.md``.]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

_FIRST_TAG, _NUM_TAGS = 1 << 24, 1 << 24
"""Tags of messages, one for each collective of a group in turn: users, who may send their own, are not likely to have
any of these, and ranks that are in another collective than others wait, but where they are as many behind."""
_LEAST_BYTES = 128 * 2**10
"""Bytes from one rank to another from which on messages are better than gloo's own collective: each of them is waited
for, by which ranks that share cores lose a millisecond or two."""


def is_by_gloo(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Tells if collectives of a group (None: all ranks) on a device's tensors are gloo's.

    Simulated groups have no backends.
    """
    group = group or dist.group.WORLD
    if group is None or device.type != "cpu":
        return False
    cpu = next((each for each in group._device_types if each.type == "cpu"), None)
    return cpu is not None and bool(group._get_backend(cpu).name() == "gloo")


@dataclass(eq=False)
class _OfGroup:
    """Collectives of a process group that send messages."""

    number: int = 0
    not_ended: deque[_Messages] = field(default_factory=deque)
    """Messages of each, in the order in which they were begun, in which they end, too. Gloo waits for ever for what is
    sent or received where nobody holds it any more, as after an error: it is held until a later one has ended."""


_OF_GROUPS = WeakKeyDictionary[dist.ProcessGroup, _OfGroup]()


class _Messages(dist.Work):
    """Messages of a collective that was begun."""

    def __init__(self, works: Sequence[dist.Work], among: _OfGroup) -> None:
        super().__init__()
        self._works, self._not_ended = deque(works), among.not_ended
        self._not_ended.append(self)

    @override
    def wait(self, timeout: Any = None) -> bool:
        """Waits until everything is received, and what was sent may be touched again; then it does nothing.

        Raises:
            RuntimeError: a rank is gone, or has not come within the group's timeout.
        """
        while self._works:
            work = self._works.popleft()  # gloo would wait for ever for one that has ended, as if Ctrl-C came then
            try:
                work.wait() if timeout is None else work.wait(timeout)
            except RuntimeError:
                self._works.appendleft(work)
                raise
        while self in self._not_ended:
            self._not_ended.popleft()
        return True


def all_gather(
    whole: Tensor, own: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """All-gathers as ``torch.distributed.all_gather_single`` does; two ranks of gloo send at the same time.

    Among more ranks gloo's ring uses each connection in one direction only, and sends least between nodes.

    Args:
        whole: is filled with the tensors of all ranks, by rank; flat in memory.
        own: tensor of this rank, which may be a part of ``whole``. Neither may be touched before the all-gather has
            ended.
        group: of the ranks; None: all.
        async_op: begin only, and return what is to be waited for.
    """
    is_small = own.nbytes < _LEAST_BYTES
    if is_small or dist.get_world_size(group) != 2 or not is_by_gloo(group, whole.device):
        work: dist.Work | None = dist.all_gather_single(whole, own, group=group, async_op=async_op)
        return work
    begun = _begin(_parts(whole, None, 2), [own.view(-1)] * 2, group)
    if async_op:
        return begun
    begun.wait()
    return None


class AllGather:
    """`all_gather` with the methods of torch's ``AllGather``, for ``set_custom_all_gather()``."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates the output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Begins the all-gather, or runs it."""
        return all_gather(output_tensor, input_tensor, group, async_op=async_op)


def begin_all_to_all(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    got: Sequence[int] | None = None,
    given: Sequence[int] | None = None,
) -> dist.Work:
    """Begins an all-to-all as ``torch.distributed.all_to_all_single`` does; ranks of gloo send and receive at once.

    Ranks of gloo send messages where numbers are given, however small they are: no rank knows those of all others.

    Args:
        received: is filled with elements from each rank, by rank; flat.
        sent: elements for each rank, by rank; flat. Neither may be touched before the all-to-all has ended.
        group: of the ranks; None: all.
        got: number of elements from each rank; None: equally many.
        given: number of elements for each rank; None: equally many.
    """
    num_ranks = dist.get_world_size(group)
    is_small = got is None and given is None and received.nbytes < _LEAST_BYTES * num_ranks
    if is_small or not is_by_gloo(group, received.device):
        work: dist.Work = dist.all_to_all_single(received, sent, got, given, group=group, async_op=True)
        return work
    return _begin(_parts(received, got, num_ranks), _parts(sent, given, num_ranks), group)


def _parts(flat: Tensor, numbers: Sequence[int] | None, num_ranks: int) -> Sequence[Tensor]:
    return [*(flat.view(num_ranks, flat.numel() // num_ranks) if numbers is None else flat.split([*numbers]))]


def _begin(into: Sequence[Tensor], outof: Sequence[Tensor], group: dist.ProcessGroup | None) -> dist.Work:
    """Begins to fill tensors by rank, and to send others by rank."""
    group = group or dist.group.WORLD
    assert group is not None
    rank, num_ranks = group.rank(), group.size()
    of_group = _OF_GROUPS.setdefault(group, _OfGroup())
    tag = _FIRST_TAG + of_group.number % _NUM_TAGS
    of_group.number += 1
    if into[rank].data_ptr() != outof[rank].data_ptr():
        into[rank].copy_(outof[rank])
    sources, targets = ([(rank + sign * step) % num_ranks for step in range(1, num_ranks)] for sign in (-1, 1))
    works = [
        *(dist.irecv(into[source], group=group, group_src=source, tag=tag) for source in sources),
        *(dist.isend(outof[target], group=group, group_dst=target, tag=tag) for target in targets),
    ]
    return _Messages([work for work in works if work is not None], of_group)
