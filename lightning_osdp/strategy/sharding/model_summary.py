"""Lightning's summary of a model, made while its parameters are whole: it is printed when they are shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary


@dataclass(frozen=True)
class WholeSummary:
    """What `ModelSummary` prints; numbers are of the whole model."""

    rows: list[tuple[str, list[str]]]
    total_parameters: int
    trainable_parameters: int
    model_size: float
    total_training_modes: dict[str, int]
    total_flops: int

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.rows


def whole_summaries(trainer: pl.Trainer, module: pl.LightningModule) -> dict[int, WholeSummary]:
    """Summaries of a module that is about to be sharded, by depth, for the callbacks that its Trainer has."""
    return {callback._max_depth: _whole(callback._summary(trainer, module)) for callback in _callbacks(trainer)}


def show_whole(trainer: pl.Trainer, summaries: Mapping[int, WholeSummary]) -> None:
    """Has the Trainer's callbacks print these, where there is one of their depth."""
    for callback in _callbacks(trainer):
        if callback._max_depth in summaries:
            summary = summaries[callback._max_depth]
            vars(callback)["_summary"] = lambda *_, summary=summary: summary


def _whole(summary: Any) -> WholeSummary:
    return WholeSummary(
        rows=summary._get_summary_data(),
        total_parameters=summary.total_parameters,
        trainable_parameters=summary.trainable_parameters,
        model_size=summary.model_size,
        total_training_modes=summary.total_training_modes,
        total_flops=summary.total_flops,
    )


def _callbacks(trainer: pl.Trainer) -> list[ModelSummary]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return [callback for callback in callbacks if isinstance(callback, ModelSummary) and callback._max_depth]
