"""Checkpoints on an exception: saved where all ranks have raised it, left out where only some have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from lightning_osdp.callbacks.peak import all_callbacks
from lightning_osdp.strategy.runtime.failure import FailureWatch

log = logging.getLogger(__name__)


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
