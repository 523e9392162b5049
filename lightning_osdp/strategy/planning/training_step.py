"""The user's training step and optimizers as the profiler runs them: muted, on the real batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import Optimizer

from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.strategy.planning.parameter_groups import Group, groups_of, names_in


def training_step(module: pl.LightningModule) -> Callable[[Any], Any]:
    """``module.training_step`` as a function of the batch alone.

    Raises:
        ConfigurationError: it takes the loader's iterator itself.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigurationError(
            "Expected training_step to take a batch, got one that takes dataloader_iter, which cannot be profiled."
            " Take a batch, or pass plan=."
        )
    return lambda batch: module.training_step(*step_arguments(module, batch))


def step_arguments(module: pl.LightningModule, batch: Any) -> tuple[Any, ...]:
    """What ``training_step`` is called with."""
    with_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, 0) if with_index else (batch,)


def to_device(trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> Any:
    """A batch of the loader as ``training_step`` gets it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


@contextmanager
def muted(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Whatever the module logs meanwhile goes nowhere."""
    loggers = trainer.loggers
    names = ("log", "log_dict", "print")
    trainer.loggers = [DummyLogger()] if loggers else []
    for name in names:
        setattr(module, name, _ignore)
    try:
        yield
    finally:
        trainer.loggers = loggers
        for name in names:
            delattr(module, name)


def configured_optimizers(
    trainer: pl.Trainer, schedules: list[Any], groups: list[Group] | None = None
) -> Callable[[nn.Module], Sequence[Optimizer]]:
    """Runs ``configure_optimizers`` on a copy of the LightningModule, in every form that Lightning accepts.

    Args:
        trainer: about to fit.
        schedules: gets its learning-rate schedules, as they are returned.
        groups: gets the parameter groups.
    """

    def configure(replica: nn.Module) -> Sequence[Optimizer]:
        assert isinstance(replica, pl.LightningModule)
        replica.trainer = trainer
        try:
            returned = call._call_lightning_module_hook(trainer, "configure_optimizers", pl_module=replica)
            if returned is None or returned == []:
                raise ProfileError(
                    f"Expected configure_optimizers to return an optimizer, got {returned}."
                    " Return one, or use another strategy: there is nothing to plan without training."
                )
            optimizers, schedules[:], _ = _configure_optimizers(returned)
            if groups is not None:
                groups[:] = groups_of(optimizers, partial(names_in, replica))
        finally:
            replica.trainer = None
            forget_loaders(trainer)
        return list(optimizers)

    return configure


def forget_loaders(trainer: pl.Trainer) -> None:
    """Drops the training loader that reading ``estimated_stepping_batches`` built before the batch size is decided."""
    loop = trainer.fit_loop
    if loop._combined_loader is None:
        return
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
        loop._data_fetcher = None
    loop._combined_loader = None
    loop.max_batches = float("inf")
    loop._last_train_dl_reload_epoch = float("-inf")


def _ignore(*_: Any, **__: Any) -> None:
    return None
