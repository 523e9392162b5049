"""Lightning's callbacks that unfreeze parameters while a model trains."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning
from lightning_utilities.core.rank_zero import rank_zero_warn


def restore_groups(trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Gives optimizers the groups of parameters that callbacks had added to them when the checkpoint was saved.

    Lightning does so in ``on_fit_start``, which is before a strategy that shards in setup has read the checkpoint.

    Args:
        trainer: about to resume, with optimizers whose state is not loaded yet.
        checkpoint: of a Trainer.
    """
    states = checkpoint.get("callbacks", {})
    for callback in _callbacks(trainer):
        if callback.state_key in states:
            callback.load_state_dict(copy.deepcopy(states[callback.state_key]))
            BaseFinetuning.on_fit_start(callback, trainer, trainer.lightning_module)


def tell_of_unfreezing(trainer: pl.Trainer) -> None:
    """Says that a plan was made for what is frozen now."""
    for callback in _callbacks(trainer):
        rank_zero_warn(
            f"OSDP: {type(callback).__name__} unfreezes parameters later, which then have gradients and states of"
            " optimizers; the plan counts them as they are when fit begins. Leave room below memory_limit for them."
        )


def _callbacks(trainer: pl.Trainer) -> list[BaseFinetuning]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
