"""SLURM's signal shortly before a job's time is up: all ranks save between two batches, and the job is queued again."""

from __future__ import annotations

from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_osdp.callbacks.peak import all_callbacks
from lightning_osdp.strategy.runtime.all_ranks import broadcast_number


class RequeueTogether(pl.Callback):
    """Calls Lightning's handler of the signal on all ranks, between the same two batches, once rank 0 has received it.

    The handler itself would save from wherever each rank happens to be: one that waits in a collective runs none, and
    one in a forward would free the parameters that it computes with.
    """

    reads_parameters = False  # to save reshards by itself: units need not be before every batch's end

    def __init__(self, trainer: pl.Trainer) -> None:
        self._signals: _SignalConnector = trainer._signal_connector
        self._received = 0  # no signal has this number
        self._signals._slurm_sigusr_handler_fn = self._note  # type: ignore[method-assign]

    @staticmethod
    def is_needed(trainer: pl.Trainer) -> bool:
        """Whether Lightning queues this job again."""
        environment = trainer._accelerator_connector.cluster_environment
        return isinstance(environment, SLURMEnvironment) and environment.auto_requeue

    def end(self, trainer: pl.Trainer) -> None:
        """Leaves the Trainer as it was without this."""
        callbacks = all_callbacks(trainer)
        callbacks[:] = [callback for callback in callbacks if callback is not self]
        vars(self._signals).pop("_slurm_sigusr_handler_fn", None)

    def _note(self, signum: int, _: FrameType | None) -> None:
        self._received = signum

    def _between_batches(self) -> None:
        signum = broadcast_number(self._received)
        if signum:
            self._received = 0
            _SignalConnector._slurm_sigusr_handler_fn(self._signals, signum, None)  # type: ignore[arg-type]

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._between_batches()

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # in a fit after the validation: a checkpoint does not tell how far one has come
        if trainer.state.fn != TrainerFn.FITTING:
            self._between_batches()

    @override
    def on_test_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._between_batches()

    @override
    def on_predict_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._between_batches()
