"""What each rank has done so far, for the others to read: who is gone, and who keeps them waiting.

Every rank writes two numbers to the process group's store: how often it has written, and how many collectives it has
entered. A rank whose first number stands still has ended or is frozen. A rank that has entered fewer collectives than
one that waits is what that one waits for: all ranks enter all collectives, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch._C._distributed_c10d import Store

_LEFT = "left"


class Beat(NamedTuple):
    """What a rank wrote last."""

    num_beats: int
    num_collectives: int


class Heartbeats:
    """Writes this rank's heartbeat, and reads the others'.

    Args:
        store: the process group's key-value store.
        run: prefix of keys.
        rank: of this process.
        world_size: number of ranks.
        num_collectives: how many this rank has entered.
    """

    def __init__(
        self, store: Store, run: str, *, rank: int, world_size: int, num_collectives: Callable[[], int]
    ) -> None:
        self._store, self._num_collectives = store, num_collectives
        self._keys = [f"{run}/beat/{each}" for each in range(world_size)]
        self._key, self._num_beats = self._keys[rank], 0

    def beat(self) -> int:
        """Says that this rank is alive; returns how many collectives it has entered."""
        self._num_beats += 1
        num_collectives = self._num_collectives()
        self._store.set(self._key, f"{self._num_beats} {num_collectives}")
        return num_collectives

    def leave(self) -> None:
        """Says that this rank is done, and no longer to be waited for."""
        self._store.set(self._key, _LEFT)

    def read(self) -> dict[int, Beat]:
        """By rank, without those that have left; empty until all have begun."""
        if not self._store.check(self._keys):
            return {}
        texts = [value.decode() for value in self._store.multi_get(self._keys)]
        return {rank: Beat(*map(int, text.split())) for rank, text in enumerate(texts) if text != _LEFT}
