"""The end of a process that used gloo."""

from __future__ import annotations

import atexit
import time

SETTLE_S = 0.3
"""[Empirical] 0.2 s to 0.4 s; a thread needs the interpreter for microseconds, but must be scheduled."""


def settle_at_exit() -> None:
    """Has this process wait a moment before the interpreter ends, once, however often this is called.

    A thread of gloo drops the tensors of the last collective only after it has told the caller that the collective is
    done. If it needs the interpreter for that while the interpreter ends, it is ended too, from within C++, and the
    process aborts with "terminate called without an active exception".
    """
    atexit.unregister(_settle)
    atexit.register(_settle)


def _settle() -> None:
    time.sleep(SETTLE_S)
