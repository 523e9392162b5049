"""SIGTERM, which clusters send before they kill: noticed whatever a rank does, and obeyed by all ranks together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_osdp.strategy.runtime.all_ranks import host_group

EXIT_CODE = 128 + signal.SIGTERM
"""What shells and clusters take for the end by this signal."""


class SigtermWatch:
    """Notices SIGTERM even while the main thread waits in a collective, where Python runs no handler.

    The interpreter itself writes the numbers of signals that have a handler, any handler, to a pipe. Notices
    nothing outside the main thread, where no handler can be registered either, and on Windows, which has no SIGTERM.
    """

    def __init__(self) -> None:
        self._reader: int | None = None
        if os.name == "posix" and threading.current_thread() is threading.main_thread():
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._reader, False)
            os.set_blocking(self._writer, False)
            self._previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def is_received(self) -> bool:
        """Whether SIGTERM has come since the last call."""
        if self._reader is None:
            return False
        try:
            return signal.SIGTERM in os.read(self._reader, 4096)
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Notices nothing from now on."""
        if self._reader is not None:
            signal.set_wakeup_fd(self._previous)
            os.close(self._reader)
            os.close(self._writer)
            self._reader = None


def end_together(trainer: pl.Trainer, is_told: Callable[[], bool]) -> None:
    """Has all ranks raise at the beginning of the same batch, after rank 0 has been told to end.

    Lightning's handler broadcasts from within, beside the collectives of the step that it interrupts: ranks that wait
    in those wait forever. Nothing is left to do there.
    """

    def raise_together() -> None:
        told = torch.tensor([int(is_told())], device="cpu")  # a device would be waited for in each batch
        dist.broadcast(told, src=0, group=host_group())
        if told.item():
            raise SIGTERMException

    trainer._signal_connector._sigterm_notifier_fn = lambda *_: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = raise_together  # type: ignore[method-assign]


def forget(trainer: pl.Trainer) -> None:
    """Undoes `end_together`: the trainer can be pickled again."""
    trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
