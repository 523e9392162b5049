"""Fits in which the host may begin in backward with updates of the optimizer step that follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_osdp.strategy.planning.same_training import unknown_hook
from lightning_osdp.strategy.precision import OSDPPrecision

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Hooks of modules and callbacks that run between two optimizer steps and may change what the next one is taken of."""
_MODULE_HOOKS = (
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "clip_gradients",
)


def why_updates_wait(trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> str | None:
    """Reason for which updates on the host begin in the optimizer's step alone; None if they may begin in backward.

    They may where everything between backward and the step is known to leave gradients, weights and options alone;
    clipping by norm does so as long as the norm is small enough. Whatever changes them all the same is found in the
    step, see `apply.updating.updates_ahead`.

    Args:
        trainer: about to fit.
        optimizers: of the fit.
    """
    return next(_reasons(trainer, optimizers), None)


def _reasons(trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> Iterator[str]:
    module, strategy, plugin = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    if not module.automatic_optimization:
        yield "optimization is manual"
    for own in (trainer.fit_loop.epoch_loop.automatic_optimization, strategy):
        if not type(own).__module__.startswith(("lightning.pytorch.", "lightning_osdp.")):
            yield f"{type(own).__name__} is not Lightning's own"
    if type(plugin) is not OSDPPrecision or plugin.scaler is not None:
        yield f"the precision {plugin.precision!r} may change gradients"
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        yield "gradients are clipped by value"
    hook = unknown_hook(trainer, module, _HOOKS, _MODULE_HOOKS)
    if hook is not None:
        yield f"{hook} may change gradients"
    if any(each._backward_hooks or each._backward_pre_hooks for each in module.modules()):
        yield "there are hooks of modules for backward"
    if any(each._backward_hooks or each._post_accumulate_grad_hooks for each in module.parameters()):
        yield "there are hooks of parameters"
    if len(optimizers) != 1:
        yield f"there are {len(optimizers)} optimizers"
    for optimizer in optimizers:
        step: Any = vars(optimizer).get("step")
        if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
            yield "the optimizer has a step of its own"
        # an optimizer that wraps another one may not have called `__init__`: what it would run is not known
        if getattr(optimizer, "_optimizer_step_pre_hooks", True) or _global_optimizer_pre_hooks:
            yield "there may be hooks of optimizer steps"
