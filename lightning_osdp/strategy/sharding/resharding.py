"""Resharding before each hook of user code, which must find parameters sharded."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from torch.optim import Optimizer
from typing_extensions import override

from lightning_osdp.apply import ShardedModel
from lightning_osdp.callbacks.peak import all_callbacks
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from lightning_osdp.strategy.runtime.ranks import SavingTogether

_CALLBACK_HOOKS = tuple(
    name
    for name in vars(pl.Callback)
    if name.startswith("on_") and name not in ("on_save_checkpoint", "on_load_checkpoint", "on_exception")
)
"""Hooks of callbacks; a Trainer calls each before the module's hook of the same name."""

_BETWEEN_STEPS = (
    "configure_gradient_clipping",
    "optimizer_step",
    "lr_scheduler_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
"""Methods of modules and datamodules that run after ranks have agreed in one step, and before the next one."""

_LIBRARY_MODULES = ("lightning.", "lightning_osdp.")
"""Packages whose callbacks do not read parameters, or reshard before they do."""


def reshard_before_hooks(trainer: pl.Trainer, sharded: ShardedModel) -> None:
    """Has a Trainer reshard before each hook that its module or one of its callbacks implements.

    Units may stay unsharded in forward, in an evaluation and between micro-batches. A hook's changes of unsharded
    parameters would be lost, and reads would give other shapes. Call it when all callbacks are there.
    """
    callbacks = all_callbacks(trainer)
    rest = [callback for callback in callbacks if not isinstance(callback, Resharding)]
    # PlanMonitor stops its clock before other callbacks validate, log or save; neither of the two reads parameters.
    first = [callback for callback in rest if isinstance(callback, (SavingTogether, PlanMonitor))]
    callbacks[:] = [*first, Resharding(sharded), *(callback for callback in rest if callback not in first)]


class Resharding(pl.Callback):
    """Callback that reshards before hooks; it stands before all callbacks that read parameters."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._is_written: dict[str, bool] = {}
        self._on_any_rank: set[str] = set()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # a callback may be on one rank alone
        written = self._sharded.largest([int(_is_written(hook, trainer)) for hook in _CALLBACK_HOOKS])
        self._on_any_rank = {hook for hook, is_written in zip(_CALLBACK_HOOKS, written, strict=True) if is_written}
        self._is_written.clear()
        self._before("on_train_start", trainer)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # in manual optimization training_step goes on after backward and may read gradients
        if not pl_module.automatic_optimization or self._has_users("on_after_backward", trainer):
            self._sharded.after_backward()
        self._before("on_after_backward", trainer)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._sharded.before_optimizer_step(optimizer)
        self._before("on_before_optimizer_step", trainer)

    @override
    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        # a window of micro-batches begins here in automatic optimization; the window before may have had no step
        self._sharded.forget_gradients()
        self._before("on_before_zero_grad", trainer)

    def _before(self, hook: str, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._has_users(hook, trainer):
            self._sharded.reshard()

    def _has_users(self, hook: str, trainer: pl.Trainer) -> bool:
        """Tells whether user code runs in this hook, or in the one right after it."""
        if hook not in self._is_written:
            # a user's own optimizer_zero_grad, which comes next, may clear gradients of all parameters that it finds
            hooks = (hook, "optimizer_zero_grad") if hook == "on_before_zero_grad" else (hook,)
            self._is_written[hook] = hook in self._on_any_rank or any(_is_written(name, trainer) for name in hooks)
        return self._is_written[hook]


def writes_between_steps(trainer: pl.Trainer) -> bool:
    """Tells whether user code runs between two steps, beside hooks before which units are resharded."""
    datamodule = getattr(trainer, "datamodule", None)
    holders = [trainer.lightning_module, *([] if datamodule is None else [datamodule])]
    return any(_has_own(hook, holder) for hook in _BETWEEN_STEPS for holder in holders)


def runs_after_backward(trainer: pl.Trainer) -> bool:
    """Tells whether user code runs between backward and the hook before an optimizer's step.

    A module's own methods in place of Lightning's may begin a second backward, or take no step.
    """
    own = any(_has_own(name, trainer.lightning_module) for name in ("backward", "optimizer_step"))
    return own or _is_written("on_after_backward", trainer)


def _is_written(hook: str, trainer: pl.Trainer) -> bool:
    """Tells whether user code runs in this hook."""
    for holder in (*all_callbacks(trainer), trainer.lightning_module):
        if not getattr(holder, "reads_parameters", True):
            continue  # the callback's author says that it neither reads nor changes parameters
        if isinstance(holder, BaseFinetuning) and hook == "on_train_epoch_start":
            return True  # BaseFinetuning reads parameters there, to add them to optimizers
        if _has_own(hook, holder):
            return True
    return False


def _has_own(hook: str, holder: object) -> bool:
    """Tells whether an object has a hook that is none of the libraries'."""
    if hook in vars(holder):  # LambdaCallback sets hooks on the instance
        return True
    owner = next((base.__module__ for base in type(holder).__mro__ if hook in vars(base)), _LIBRARY_MODULES[0])
    return not owner.startswith(_LIBRARY_MODULES)


for _name in set(_CALLBACK_HOOKS) - set(vars(Resharding)):
    setattr(Resharding, _name, partialmethod(Resharding._before, _name))
