"""Training that an exception interrupts, or SIGTERM, which clusters send first: ranks save and end together."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_osdp.callbacks.peak import all_callbacks
from lightning_osdp.strategy.runtime.all_ranks import host_group
from lightning_osdp.strategy.runtime.failure import FailureWatch

log = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
"""What shells and clusters take for the end by this signal."""


class SavingTogether(pl.Callback):
    """The first to hear of an exception: keeps others from saving where ranks would wait for each other.

    What a callback raises while it saves would replace the user's exception, and a collective that the other ranks are
    not in would be taken for another one's, or wait. ``watch`` is None where this rank is alone.
    """

    def __init__(self, watch: FailureWatch | None, has_states: Callable[[], bool]) -> None:
        self._watch, self._has_states = watch, has_states
        self._left_out: list[pl.Callback] = []

    @cached_property
    def _can_save(self) -> bool:
        """Whether all ranks can save after this rank's exception, which is asked only where somebody saves."""
        has_states = self._has_states()
        can = has_states and (self._watch is None or self._watch.have_all_raised())
        if not can:
            why = "not all have raised one at the same point" if has_states else "there is nothing to save yet"
            log.warning("OSDP: no checkpoint is saved on this exception: all ranks must save together, and %s.", why)
        return can

    def begin(self, trainer: pl.Trainer) -> None:
        """Listens from now on."""
        all_callbacks(trainer).insert(0, self)

    def end(self, trainer: pl.Trainer) -> None:
        """Undoes it."""
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
            # behind this one in the list that is being iterated over now
            self._left_out = saving
            callbacks[:] = [callback for callback in callbacks if callback not in saving]


def _saves(callback: pl.Callback) -> bool:
    """Whether it saves on an exception: ``ModelCheckpoint`` if it was asked to, others whenever they have the hook."""
    is_written = type(callback).on_exception is not pl.Callback.on_exception
    return isinstance(callback, Checkpoint) and is_written and getattr(callback, "save_on_exception", True)


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
