"""End of all ranks, in bounded time and with one error text, after one rank failed.

A rank that waits in a collective for a failed one would wait for the process group's timeout, half an hour by default.
The wait ends sooner only where sockets close; they stay open while the failed process lives, and NCCL ignores them.

Every rank writes a heartbeat to the process group's store: how often it has written, and how many collectives it has
entered. A rank whose first number stands still has ended or is frozen. All ranks enter all collectives in the same
order, so a waiting rank waits for the ranks that have entered fewer collectives.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Store

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between reads of the store: few requests of well under a millisecond each."""
GRACE_S = 10.0
"""Seconds that a rank has to end by itself after another failed, before its process is ended."""
SIGTERM_GRACE_S = 20.0
"""Seconds that a rank has after SIGTERM to finish its step; most clusters wait longer before they kill."""
MEETING_S = 5.0
"""Longest that a failed rank waits for all others to fail, too, before a checkpoint is saved on the exception."""
LINGER_S = 5.0
"""Longest that a failed rank waits until all others know of the failure: the store may end with its process."""
TEARDOWN_S = 120.0
"""Longest that a failed rank's teardown takes, with what loggers send.

A collective that never ends may block the device, and with it all that waits for the device, such as moving the model.
"""
PATIENCE_S = 2.0
"""Seconds of teardown after which the error is printed: Python prints it at the end, which may never come."""
LAST_WORDS_S = 5.0
"""Longest that a process takes to log where it is before it is ended: output may be blocked, too."""
SILENCE_S = 4.0
"""Seconds without a heartbeat, eight times `POLL_S`, after which a rank counts as ended or frozen."""
_LEFT = "left"
"""Value in place of a heartbeat for a rank that is done."""
_SIGTERM = "received SIGTERM, so every rank ends."
_STORE_GONE = (
    "Rank 0, or torchrun on its node, ended without reporting an error: it was killed, or its machine is gone."
)


class Heartbeat(NamedTuple):
    """Latest heartbeat of a rank."""

    num_beats: int
    num_collectives: int


class FailureWatch:
    """Watch that tells other ranks when this one fails, and ends this process when another rank has failed.

    Args:
        store: the process group's.
        run: name of the watch in the store, the same on all ranks; no other watch may have it.
        rank: number of this rank.
        world_size: number of ranks.
        num_collectives: returns how many collectives this rank has entered.
        stall_s: longest that a rank may wait for another in a collective.
        is_terminated: tells whether this rank has received SIGTERM since the last call.
        grace_s: seconds in which this process is to end by itself after another rank failed.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        rank: int,
        world_size: int,
        num_collectives: Callable[[], int] = int,
        stall_s: float = float("inf"),
        is_terminated: Callable[[], bool] = bool,
        grace_s: float = GRACE_S,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._stall_s, self._is_terminated, self._grace_s = stall_s, is_terminated, grace_s
        run = f"lightning_osdp/{run}"
        self._failure, self._informed, self._done = f"{run}/failure", f"{run}/informed", f"{run}/over"
        self._raised = [f"{run}/raised/{each}" for each in range(world_size)]
        self._meeting = f"{run}/meeting"
        self._beats = [f"{run}/beat/{each}" for each in range(world_size)]
        self._count_collectives, self._num_beats = num_collectives, 0
        self._num_collectives, self._since_s = -1, 0.0  # at the last change of the number, and when that was
        self._first: str | None = None  # text of the first failure, once this rank knows
        self._timers: list[threading.Timer] = []  # begun when this rank has failed
        self._knows, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="osdp-failure-watch", daemon=True)

    @property
    def is_terminating(self) -> bool:
        """True once all ranks end because one of them has received SIGTERM."""
        return self._first is not None and self._first.endswith(_SIGTERM)

    def start(self) -> None:
        """Starts watching, in a thread."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Stops watching, as this rank is done; ends the thread, which must not outlive the interpreter."""
        is_first = not self._stopped.is_set()
        self._end_thread()
        self._cancel_timers()
        if is_first and self._first is None:
            try:
                self._store.set(self._beats[self._rank], _LEFT)
                if self._rank == 0:
                    self._store.set(self._done, "")
            except RuntimeError:
                log.debug("The store is gone, and with it the others", exc_info=True)

    def report(self, error: BaseException) -> str | None:
        """Tells other ranks of this rank's error, and waits for `LINGER_S` at most until all know.

        The process is ended `TEARDOWN_S` later, unless `stop` is called before.

        Returns:
            The text of the rank that failed first, if that was another one.
        """
        mine = f"Rank {self._rank} failed: {type(error).__name__}: {error}"
        try:
            text = (self._cause() if is_echo(error) else None) or mine
            self._end_thread()
            self._claim(text)
            # A process that was interrupted, by a signal or the keyboard, must not wait.
            deadline = time.monotonic() + (LINGER_S if isinstance(error, Exception) else 0.0)
            while self._store.add(self._informed, 0) < self._world_size and time.monotonic() < deadline:
                time.sleep(POLL_S / 10)
        except RuntimeError:
            # The store ends with rank 0's process, which waits only until all ranks know of the failure.
            log.debug("The store is gone, and with it the others", exc_info=True)
            self._learn(_STORE_GONE)
        self._end_thread()
        self._cancel_timers()
        self._timers.append(_timer(TEARDOWN_S, partial(self._end_now, self._first or mine, TEARDOWN_S)))
        return None if self._first == mine else self._first

    def tell_if_slow(self, error: BaseException) -> None:
        """Prints a reported error with its traceback, unless `stop` is called within `PATIENCE_S`."""
        text = "Rank %d failed, and its teardown waits, perhaps for ranks that wait for this one."
        self._timers.append(_timer(PATIENCE_S, partial(log.error, text, self._rank, exc_info=error)))

    def have_all_raised(self) -> bool:
        """Waits until all ranks have raised; gives all the same answer, True after the same collective."""
        try:
            self._store.set(self._raised[self._rank], str(self._beat()))
            deadline = time.monotonic() + MEETING_S
            while not self._store.check(self._raised) and time.monotonic() < deadline:
                time.sleep(POLL_S / 10)
            are_there = self._store.check(self._raised)
            is_same = are_there and len(set(self._store.multi_get(self._raised))) == 1
            return self._store.compare_set(self._meeting, "", "yes" if is_same else "no") == b"yes"
        except RuntimeError:
            log.debug("The store is gone, and with it the others", exc_info=True)
            return False

    def _beat(self) -> int:
        """Writes a heartbeat; returns how many collectives this rank has entered."""
        self._num_beats += 1
        num_collectives = self._count_collectives()
        self._store.set(self._beats[self._rank], f"{self._num_beats} {num_collectives}")
        return num_collectives

    def _read_beats(self) -> dict[int, Heartbeat]:
        """Reads heartbeats by rank, without ranks that are done; empty until all have begun."""
        if not self._store.check(self._beats):
            return {}
        texts = [value.decode() for value in self._store.multi_get(self._beats)]
        return {rank: Heartbeat(*map(int, text.split())) for rank, text in enumerate(texts) if text != _LEFT}

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                text = self._news()
            except RuntimeError:
                text = self._first or _STORE_GONE
                self._learn(text)
            if text is not None:
                self._end_process(text)
                return

    def _news(self) -> str | None:
        """Looks for a reason to end all ranks; returns its text, or None."""
        if self._is_terminated():
            return self._claim(f"Rank {self._rank} {_SIGTERM}")
        if self._store.check([self._failure]):
            self._learn(self._store.get(self._failure).decode())
            return self._first
        if self._store.check([self._done]):
            self._store.set(self._beats[self._rank], _LEFT)
            self._stopped.set()  # rank 0 is done, and the store may end with it
            return None
        stalled = self._stalled()
        return None if stalled is None else self._claim(stalled)

    def _stalled(self) -> str | None:
        """Names the ranks that this one waits for, if it has waited for too long."""
        now_s, num_collectives = time.monotonic(), self._beat()
        if num_collectives != self._num_collectives:
            self._num_collectives, self._since_s = num_collectives, now_s
            return None
        if now_s - self._since_s < self._stall_s:
            return None
        behind = [rank for rank, beat in self._read_beats().items() if beat.num_collectives < num_collectives]
        ranks = behind or self._silent_ranks()
        if not ranks:
            self._since_s = now_s  # no rank is behind: each computes by itself
            return None
        return (
            f"{_ranks_text(ranks)} stalled: rank {self._rank} has waited {self._stall_s:g} s in a collective for it."
            " Where it is stands in its own output. OSDPStrategy(timeout=...) is how long ranks may wait."
        )

    def _silent_ranks(self) -> list[int]:
        """Lists other ranks that write no heartbeat for `SILENCE_S`."""
        before, deadline = self._read_beats(), time.monotonic() + SILENCE_S
        before.pop(self._rank, None)
        while True:
            now = self._read_beats()
            silent = [rank for rank in now if rank in before and now[rank].num_beats == before[rank].num_beats]
            if not silent or self._knows.is_set() or time.monotonic() > deadline:
                return silent
            self._knows.wait(POLL_S)
            self._beat()  # other ranks may look for silent ones at the same time

    def _cause(self) -> str | None:
        """Finds why a collective broke: a failure that was reported, or a rank that ended without reporting one."""
        ranks = self._silent_ranks()
        if self._first is not None or not ranks:
            return self._first
        return f"{_ranks_text(ranks)} ended without reporting an error: killed, or the machine is gone."

    def _claim(self, text: str) -> str:
        """Writes this failure to the store, unless there is one already; returns the first."""
        first = self._store.compare_set(self._failure, "", text).decode()
        self._learn(first)
        return first

    def _learn(self, text: str) -> None:
        if self._first is None:
            self._first = text
            self._knows.set()
            if text != _STORE_GONE:
                self._store.add(self._informed, 1)

    def _end_process(self, text: str) -> None:
        """Ends this process, unless it ends by itself in time."""
        grace_s = SIGTERM_GRACE_S if self.is_terminating else self._grace_s
        soon_s = min(POLL_S, grace_s)
        if self._stopped.wait(soon_s):  # this rank raises an error of its own, which will say why
            return
        log.error("%s Rank %d is given %g s to end, too.", text, self._rank, grace_s)
        if not self._stopped.wait(grace_s - soon_s):
            self._end_now(text, grace_s)

    def _end_now(self, text: str, waited_s: float) -> None:
        _timer(LAST_WORDS_S, partial(os._exit, 1))  # logging may block
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        place = "".join(traceback.format_stack(frame))
        ending = f"Rank {self._rank} has not ended by itself in {waited_s:g} s: ending it. It is at"
        log.error("%s\n%s\n%s", text, ending, place)
        logging.shutdown()
        os._exit(1)

    def _cancel_timers(self) -> None:
        while self._timers:
            self._timers.pop().cancel()

    def _end_thread(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()


def _timer(seconds: float, action: Callable[[], None]) -> threading.Timer:
    """Starts a timer whose thread does not keep the process from ending."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


def is_echo(error: BaseException) -> bool:
    """Tells whether another rank's failure may be the cause: a broken collective raises errors of these types."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
