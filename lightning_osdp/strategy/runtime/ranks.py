"""What becomes of the other ranks when one fails or receives SIGTERM, and of the process when its rank is done."""

from __future__ import annotations

import atexit
import logging
import math
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.constants import default_pg_timeout

from lightning_osdp.apply import NODE_GROUPS
from lightning_osdp.strategy.runtime import failure
from lightning_osdp.strategy.runtime.all_ranks import first_rank, host_group
from lightning_osdp.strategy.runtime.error_texts import explain_echo, print_one_line
from lightning_osdp.strategy.runtime.failure import FailureWatch, is_echo
from lightning_osdp.strategy.runtime.interrupted import EXIT_CODE, SavingTogether, SigtermWatch, end_together, forget

log = logging.getLogger(__name__)

STALL_SHARE = 0.9
"""Of the process group's timeout, after which waiting ranks only know that they have waited."""
SETTLE_S = 0.3
"""[Empirical] 0.2 s to 0.4 s; a thread needs the interpreter for microseconds, but must be scheduled."""


class RanksTogether:
    """Ends all ranks when one fails or receives SIGTERM, and lets them save only together."""

    def __init__(self, strategy: FSDPStrategy) -> None:
        self._strategy = strategy
        self._watch: FailureWatch | None = None
        self._sigterm: SigtermWatch | None = None
        self._saving: SavingTogether | None = None

    def begin(self, has_states: Callable[[], bool]) -> None:
        """Watches from now on; the process group is there, and all ranks call it."""
        strategy, module = self._strategy, self._strategy.lightning_module
        assert module is not None
        if dist.get_backend() == "gloo":
            _settle_at_exit()
        if strategy.world_size > 1:
            host_group()  # now that no rank has failed
            run, timeout = strategy.broadcast(uuid4().hex), strategy._timeout or default_pg_timeout
            self._sigterm = SigtermWatch()
            self._watch = watch = FailureWatch(
                dist.distributed_c10d._get_default_store(),
                run,
                rank=strategy.global_rank,
                world_size=strategy.world_size,
                num_collectives=partial(collectives_entered, strategy.world_size),
                stall_s=STALL_SHARE * timeout.total_seconds(),
                is_terminated=self._sigterm.is_received,
            )
            watch.start()
            end_together(module.trainer, lambda: watch.is_terminating)
        self._saving = SavingTogether(self._watch, has_states)
        self._saving.begin(module.trainer)

    def report(self, error: BaseException) -> None:
        """Tells the others of this rank's error, and appends to it what made another one fail first."""
        if self._watch is None:
            return
        cause = self._watch.report(error)
        _bound_exit()
        explain_echo(error, cause)
        rank, first = self._strategy.global_rank, first_rank(error)
        if first not in (None, rank):
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            print_one_line(error, f"OSDP: rank {rank} ends as rank {first} does: {text}")
        elif first is None and cause is not None and is_echo(error):
            print_one_line(error, f"OSDP: rank {rank} ends, for another one failed. {cause}")
        if isinstance(error, SIGTERMException):
            log.error("%s Rank %d ended between two steps.", cause, rank)
            # Lightning's launcher kills this process as soon as another one ends with an error.
            error.code = EXIT_CODE if self._strategy.local_rank == 0 else 0

    def end(self) -> None:
        """This rank is done."""
        module = self._strategy.lightning_module
        if self._watch is not None:
            self._watch.stop()
            assert self._sigterm is not None
            self._sigterm.close()
            assert module is not None
            forget(module.trainer)
        if self._saving is not None:
            assert module is not None
            self._saving.end(module.trainer)


def collectives_entered(world_size: int) -> int:
    """How many collectives this rank has entered with all ranks, or those of nodes; of gloo and NCCL, who count.

    All ranks are in as many groups of these.
    """
    found: list[Any] = list(dist.distributed_c10d._world.pg_map)
    groups = [group for group in found if group.size() == world_size or group.group_desc in NODE_GROUPS]
    backends = {group._get_backend(device) for group in groups for device in group._device_types}
    return sum(each._get_sequence_number_for_group() for each in backends if each.name() in {"gloo", "nccl"})


def _bound_exit() -> None:
    """Has the kernel end this process where the interpreter takes longer than `TEARDOWN_S` to end.

    No thread of Python's can by then, and what is freed at the end may wait for a device whose collective never ends.
    """
    if hasattr(signal, "alarm"):  # not on Windows
        atexit.unregister(_set_alarm)
        atexit.register(_set_alarm)


def _set_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(failure.TEARDOWN_S))


def _settle_at_exit() -> None:
    """Has this process wait a moment before the interpreter ends, once, however often this is called.

    A thread of gloo drops the tensors of the last collective only after it has told the caller that the collective is
    done. If it needs the interpreter for that while the interpreter ends, it is ended too, from within C++, and the
    process aborts with "terminate called without an active exception".
    """
    atexit.unregister(_settle)
    atexit.register(_settle)


def _settle() -> None:
    time.sleep(SETTLE_S)
