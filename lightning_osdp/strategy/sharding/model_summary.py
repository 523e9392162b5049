"""Lightning's summary of a model, made while its parameters are whole: it is printed when they are shards."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary

_PRINTED = ("total_parameters", "trainable_parameters", "model_size", "total_training_modes", "total_flops")


def whole_summaries(trainer: pl.Trainer, module: pl.LightningModule) -> dict[int, SimpleNamespace]:
    """What `ModelSummary` prints of a module that is about to be sharded, by depth, for its Trainer's callbacks."""
    return {callback._max_depth: _whole(callback._summary(trainer, module)) for callback in _callbacks(trainer)}


def show_whole(trainer: pl.Trainer, summaries: Mapping[int, SimpleNamespace]) -> None:
    """Has the Trainer's callbacks print these, where there is one of their depth."""
    for callback in _callbacks(trainer):
        if callback._max_depth in summaries:
            summary = summaries[callback._max_depth]
            vars(callback)["_summary"] = lambda *_, summary=summary: summary


def _whole(summary: Any) -> SimpleNamespace:
    """Its numbers and rows, which Lightning computes when they are asked for."""
    rows = summary._get_summary_data()
    return SimpleNamespace(_get_summary_data=lambda: rows, **{name: getattr(summary, name) for name in _PRINTED})


def _callbacks(trainer: pl.Trainer) -> list[ModelSummary]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [callback for callback in callbacks if isinstance(callback, ModelSummary) and callback._max_depth]
