"""Joint end of all ranks when one fails, is done, or receives SIGTERM, which clusters send before they kill."""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any
from uuid import uuid4

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_osdp.apply import NODE_GROUPS
from lightning_osdp.callbacks.peak import all_callbacks
from lightning_osdp.strategy.runtime import failure
from lightning_osdp.strategy.runtime.all_ranks import broadcast_number, first_rank, host_group
from lightning_osdp.strategy.runtime.error_texts import explain_echo, print_one_line
from lightning_osdp.strategy.runtime.failure import FailureWatch, is_echo
from lightning_osdp.strategy.runtime.requeue import RequeueTogether

log = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code that shells and clusters take for an end by SIGTERM."""
STALL_SHARE = 0.9
"""Share of the process group's timeout after which a rank is called stalled: at the timeout, nobody knows which."""
SETTLE_S = 0.3
"""Seconds that gloo's threads get to finish [Empirical: 0.2 s to 0.4 s; a thread needs microseconds once scheduled]."""


class RanksTogether:
    """Ends all ranks when one fails or receives SIGTERM, and lets them save only together."""

    def __init__(self, strategy: FSDPStrategy) -> None:
        self._strategy = strategy
        self._watch: FailureWatch | None = None
        self._ending = ExitStack()

    def begin(self, has_states: Callable[[], bool]) -> None:
        """Starts watching; all ranks call it once the process group is initialized."""
        strategy, module = self._strategy, self._strategy.lightning_module
        assert module is not None
        if dist.get_backend() == "gloo":
            atexit.unregister(_settle)  # an earlier stage may have registered it
            atexit.register(_settle)
        if strategy.world_size > 1:
            host_group()  # made while all ranks are alive
            run, timeout = strategy.broadcast(uuid4().hex), strategy._timeout or default_pg_timeout
            sigterm = SigtermWatch()
            self._watch = watch = FailureWatch(
                dist.distributed_c10d._get_default_store(),
                run,
                rank=strategy.global_rank,
                world_size=strategy.world_size,
                num_collectives=partial(collectives_entered, strategy.world_size),
                stall_s=STALL_SHARE * timeout.total_seconds(),
                is_terminated=sigterm.is_received,
            )
            watch.start()
            end_together(module.trainer, lambda: watch.is_terminating)
            self._ending.callback(restore_sigterm_handling, module.trainer)
            self._ending.callback(sigterm.close)
            self._ending.callback(watch.stop)  # called first: the watch reads the pipe that close() closes
        if RequeueTogether.is_needed(module.trainer):
            requeue = RequeueTogether(module.trainer)
            all_callbacks(module.trainer).insert(0, requeue)
            self._ending.callback(requeue.end, module.trainer)
        saving = SavingTogether(self._watch, has_states)
        all_callbacks(module.trainer).insert(0, saving)
        self._ending.callback(saving.end, module.trainer)

    def report(self, error: BaseException) -> None:
        """Tells other ranks of this rank's error, and appends to the error the text of the rank that failed first."""
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
        elif isinstance(error, Exception):
            self._watch.tell_if_slow(error)
        if isinstance(error, SIGTERMException):
            log.error("%s Rank %d ended between two steps.", cause, rank)
            # Lightning's launcher kills the first local rank as soon as another one ends with an error.
            error.code = EXIT_CODE if self._strategy.local_rank == 0 else 0

    def end(self) -> None:
        """Stops watching: this rank is done."""
        self._ending.close()


class SavingTogether(pl.Callback):
    """Keeps callbacks from saving on an exception that not all ranks have; it hears of exceptions first.

    Saving runs collectives. Ranks that have no exception would not join them, and an error while saving would replace
    the user's exception. ``watch`` is None where there is only one rank.
    """

    def __init__(self, watch: FailureWatch | None, has_states: Callable[[], bool]) -> None:
        self._watch, self._has_states = watch, has_states
        self._left_out: list[pl.Callback] = []

    @cached_property
    def _can_save(self) -> bool:
        """True if all ranks can save after this rank's exception; cached, as ranks must meet to find out."""
        has_states = self._has_states()
        can = has_states and (self._watch is None or self._watch.have_all_raised())
        if not can:
            why = "not all have raised one at the same point" if has_states else "there is nothing to save yet"
            log.warning("OSDP: no checkpoint is saved on this exception: all ranks must save together, and %s.", why)
        return can

    def end(self, trainer: pl.Trainer) -> None:
        """Removes this callback from the Trainer, and brings back those that it has left out."""
        callbacks = all_callbacks(trainer)
        callbacks[:] = [*(callback for callback in callbacks if callback is not self), *self._left_out]
        self._left_out = []
        vars(trainer).pop("save_checkpoint", None)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        callbacks, save = all_callbacks(trainer), trainer.save_checkpoint

        def save_if_possible(*args: Any, **kwargs: Any) -> None:
            if self._can_save:
                save(*args, **kwargs)

        trainer.save_checkpoint = save_if_possible  # type: ignore[method-assign]
        saving = [callback for callback in callbacks if _saves(callback)]
        if saving and not self._can_save:
            # the Trainer is iterating over this list now, and has not come to those yet
            self._left_out = saving
            callbacks[:] = [callback for callback in callbacks if callback not in saving]


def _saves(callback: pl.Callback) -> bool:
    """Tells whether a callback saves on an exception; `ModelCheckpoint` has an option, others have the hook."""
    is_written = type(callback).on_exception is not pl.Callback.on_exception
    return isinstance(callback, Checkpoint) and is_written and getattr(callback, "save_on_exception", True)


class SigtermWatch:
    """Watch for SIGTERM that works even while the main thread waits in a collective, where Python runs no handler.

    The interpreter writes the number of each signal that has a handler to a pipe. The watch does nothing outside the
    main thread, where no handler can be registered either, and on Windows, which has no SIGTERM.
    """

    def __init__(self) -> None:
        self._reader: int | None = None
        if os.name == "posix" and threading.current_thread() is threading.main_thread():
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._reader, False)
            os.set_blocking(self._writer, False)
            self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def is_received(self) -> bool:
        """Tells whether SIGTERM has come since the last call."""
        if self._reader is None:
            return False
        try:
            return signal.SIGTERM in os.read(self._reader, 4096)
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Stops watching."""
        if self._reader is not None:
            signal.set_wakeup_fd(self._previous)
            os.close(self._reader)
            os.close(self._writer)
            self._reader = None


def end_together(trainer: pl.Trainer, is_told: Callable[[], bool]) -> None:
    """Has all ranks raise a `SIGTERMException` at the beginning of the same batch, once rank 0 knows of a SIGTERM.

    Lightning's handler would broadcast in the midst of a step, and ranks that wait in the step's collectives would
    wait forever. So the handler does nothing here.
    """

    def raise_together() -> None:
        if broadcast_number(is_told()):
            raise SIGTERMException

    trainer._signal_connector._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = raise_together  # type: ignore[method-assign]


def restore_sigterm_handling(trainer: pl.Trainer) -> None:
    """Undoes `end_together`, so that the Trainer can be pickled again."""
    trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def collectives_entered(world_size: int) -> int:
    """Counts collectives that this rank has entered in groups of all ranks or of nodes, by gloo and NCCL.

    All ranks enter the same collectives, so that equal progress is an equal count.
    """
    groups = dist.distributed_c10d._world.pg_map
    return sum(_entered(group) for group in groups if group.size() == world_size or group.group_desc in NODE_GROUPS)


def collectives_by_group() -> dict[str, int]:
    """Counts collectives that this rank has entered in each process group, by the group's name."""
    return {group.group_name: _entered(group) for group in dist.distributed_c10d._world.pg_map}


def _entered(group: Any) -> int:
    backends = {group._get_backend(device) for device in group._device_types}
    return sum(each._get_sequence_number_for_group() for each in backends if each.name() in {"gloo", "nccl"})


def _bound_exit() -> None:
    """Has the kernel end this process if the interpreter takes longer than `TEARDOWN_S` to end.

    Python's threads cannot run by then, and freeing memory may wait for a device whose collective never ends.
    """
    if hasattr(signal, "alarm"):  # not on Windows
        atexit.unregister(_set_alarm)
        atexit.register(_set_alarm)


def _set_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(failure.TEARDOWN_S))


def _settle() -> None:
    """Waits a moment before the interpreter ends, for gloo's threads to drop the tensors of the last collective.

    A thread of gloo drops these tensors only after it has told the caller that the collective is done. If the thread
    asks for the interpreter while the interpreter ends, Python ends the thread from within C++, and the process aborts
    with "terminate called without an active exception".
    """
    time.sleep(SETTLE_S)
