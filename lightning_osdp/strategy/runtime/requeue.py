"""Requeueing of SLURM jobs: on the signal before a job's time is up, all ranks save between the same two batches."""

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

    By itself the handler would save wherever each rank happens to be. A rank that waits in a collective runs no
    handler, and a rank in forward would free parameters that it computes with.
    """

    reads_parameters = False  # units need not be resharded at the end of each batch

    def __init__(self, trainer: pl.Trainer) -> None:
        self._signals: _SignalConnector = trainer._signal_connector
        self._received = 0  # no signal has this number
        self._signals._slurm_sigusr_handler_fn = self._note  # type: ignore[method-assign]

    @staticmethod
    def is_needed(trainer: pl.Trainer) -> bool:
        """Tells whether Lightning requeues this job."""
        environment = trainer._accelerator_connector.cluster_environment
        return isinstance(environment, SLURMEnvironment) and environment.auto_requeue

    def end(self, trainer: pl.Trainer) -> None:
        """Removes this callback from the Trainer, and restores Lightning's handler."""
        callbacks = all_callbacks(trainer)
        callbacks[:] = [callback for callback in callbacks if callback is not self]
        vars(self._signals).pop("_slurm_sigusr_handler_fn", None)

    def _note(self, signum: int, _: FrameType | None) -> None:
        self._received = signum

    @override
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        signum = broadcast_number(self._received)
        if signum:
            self._received = 0
            _SignalConnector._slurm_sigusr_handler_fn(self._signals, signum, None)  # type: ignore[arg-type]

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        # in a fit only between training batches: a checkpoint has no progress of a validation
        if trainer.state.fn != TrainerFn.FITTING:
            self.on_train_batch_end()

    on_test_batch_end = on_predict_batch_end = on_train_batch_end
