"""One rank's failure, told to the others: they end too, in bounded time and with its text.

A rank that waits in a collective for one that failed would wait for the process group's timeout, half an hour by
default, unless the other's sockets close: they do not while its process lives, and NCCL does not notice.
"""

from __future__ import annotations

import logging
import os
import threading
import time

import torch.distributed as dist
from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between looks at the store: one request of well under a millisecond each."""
GRACE_S = 10.0
"""Seconds that a rank is given to end by itself after another failed, before its process is ended."""
LINGER_S = 5.0
"""Longest that a failed rank waits until all others know: the store may end with its process."""


class FailureWatch:
    """Tells the other ranks when this one fails, and ends this one when another did.

    Args:
        store: the process group's key-value store.
        run: a name that all ranks share and no other watch has.
        rank: of this process.
        world_size: number of ranks.
        grace_s: seconds that this rank has to end by itself after another failed.
    """

    def __init__(self, store: Store, run: str, *, rank: int, world_size: int, grace_s: float = GRACE_S) -> None:
        self._store, self._rank, self._world_size, self._grace_s = store, rank, world_size, grace_s
        self._failure, self._informed = f"lightning_osdp/{run}/failure", f"lightning_osdp/{run}/informed"
        self._first: str | None = None  # what the rank that failed first had to say, once this one knows
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="osdp-failure-watch", daemon=True)

    def start(self) -> None:
        """Watches from now on, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops watching; the thread is gone when this returns, which it must be before the interpreter ends."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def report(self, error: BaseException) -> str | None:
        """Tells the others of this rank's error, and waits until they know it, for `LINGER_S` at most.

        Returns:
            What the rank that failed first had to say, if that was another one.
        """
        self.stop()
        mine = f"Rank {self._rank} failed: {type(error).__name__}: {error}"
        try:
            self._learn(self._store.compare_set(self._failure, "", mine).decode())
            # Whoever was interrupted, by a signal or the keyboard, must not wait.
            deadline = time.monotonic() + (LINGER_S if isinstance(error, Exception) else 0.0)
            while self._store.add(self._informed, 0) < self._world_size and time.monotonic() < deadline:
                time.sleep(POLL_S / 10)
        except RuntimeError:
            # It ends with the process that holds it, which waits only until all know of the failure.
            log.debug("The store is gone, and with it the others", exc_info=True)
        return None if self._first == mine else self._first

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                if not self._store.check([self._failure]):
                    continue
                text = self._store.get(self._failure).decode()
                self._learn(text)
            except RuntimeError:
                return  # the store's process ended: collectives notice
            if not self._stopped.wait(self._grace_s):
                log.error("%s\nRank %d still waits for it after %g s: ending.", text, self._rank, self._grace_s)
                logging.shutdown()
                os._exit(1)
            return

    def _learn(self, text: str) -> None:
        if self._first is None:
            self._first = text
            self._store.add(self._informed, 1)


def explain(error: BaseException, cause: str | None) -> None:
    """Appends what made another rank fail first to an error that is only its echo: a collective that broke."""
    is_echo = type(error) is RuntimeError or isinstance(error, dist.DistError)
    if cause is not None and is_echo and not cause.endswith(str(error)):
        error.args = (f"{error}\n{cause}", *error.args[1:])
