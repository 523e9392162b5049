"""The division of optimizer steps into micro-batches in use: what loaders, Trainer and checkpoints know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.report import tell_accumulation
from lightning_osdp.strategy.batching.loaders import LoaderChange
from lightning_osdp.strategy.batching.rebuild import FixedLoaderError
from lightning_osdp.strategy.batching.windows import Windows
from lightning_osdp.strategy.planning.training_step import forget_loaders

_KEY = "osdp_division"
"""Of a checkpoint's entry: samples of a micro-batch, and micro-batches of a step."""


@dataclass
class Division:
    """Micro-batches of one strategy's fits.

    Attributes:
        change: what becomes of training loaders.
        windows: what the user has, where the plan may divide the same samples in another way; None where it may not.
        sizes: micro-batches that may be chosen then.
        size: of the micro-batches in use then.
        number: of them in an optimizer step.
    """

    change: LoaderChange = field(default_factory=LoaderChange)
    windows: Windows | None = None
    sizes: tuple[int, ...] = ()
    size: int = 0
    number: int = 0
    _trainer: pl.Trainer | None = None

    def begin(self, trainer: pl.Trainer) -> None:
        """A fit begins."""
        if self.windows is None or self._trainer is trainer:
            return
        if not self.windows.are_of(trainer):
            rank_zero_warn(
                "OSDP: this Trainer counts or accumulates micro-batches in another way than the one that the plan was"
                " made under, so it keeps its own."
            )
            self.windows, self.change = None, dataclasses.replace(self.change, batch_size=None)
            return
        self._trainer = trainer
        self._use(trainer, self.size, self.number)

    def end(self, trainer: pl.Trainer) -> None:
        """Gives the Trainer back what it had, before a fit of another model is planned."""
        if self.windows is not None and self._trainer is trainer and trainer.accumulate_grad_batches == self.number:
            own = self.windows
            own.divide(trainer, micro_batch_size=own.micro_batch_size, num_micro_batches=own.num_micro_batches)

    def resume(self, trainer: pl.Trainer, checkpoint: Mapping[str, Any]) -> None:
        """A fit goes on from a checkpoint: its progress is counted in the micro-batches of the run that wrote it."""
        if self.windows is None:
            return
        own = (self.windows.micro_batch_size, self.windows.num_micro_batches)
        size, number = checkpoint.get(_KEY, own)
        if size in self.sizes and size != self.size and size * number == self.windows.num_samples:
            rank_zero_info(
                f"OSDP: training goes on with {size} samples x {number} micro-batches, in which the checkpoint counts,"
                f" instead of the plan's {self.size} x {self.number}."
            )
            self._use(trainer, size, number)
            forget_loaders(trainer)

    @property
    def smaller(self) -> int | None:
        """The next smaller micro-batch of the same optimizer steps, if there is one."""
        return None if self.windows is None else max((size for size in self.sizes if size < self.size), default=None)

    def divide(self, trainer: pl.Trainer, size: int) -> None:
        """Changes to micro-batches of this size before the first step; loaders are made anew."""
        self._use(trainer, size, self.size * self.number // size)
        forget_loaders(trainer)
        trainer.fit_loop.setup_data()

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Writes the division in use into a checkpoint."""
        if self.windows is not None:
            checkpoint[_KEY] = (self.size, self.number)

    def compared(self, plan: Plan) -> str:
        """What dividing and accumulating as planned costs and saves, in a sentence; empty if nothing is different."""
        size = plan.micro_batch_size if self.windows is None else self.windows.micro_batch_size
        number = plan.micro_batch_size * plan.num_micro_batches // size
        units = tuple(dataclasses.replace(unit, sync="every") for unit in plan.units)
        without = dataclasses.replace(plan, micro_batch_size=size, num_micro_batches=number, units=units)
        return tell_accumulation(plan, without)

    def loader(self, loader: object) -> object:
        """The loader to train on."""
        try:
            return self.change(loader)
        except FixedLoaderError as error:
            size = self.change.batch_size
            rank_zero_warn(f"OSDP: the plan's micro-batch is {size}, but the loader keeps its own: {error}.")
            return loader

    def _use(self, trainer: pl.Trainer, size: int, number: int) -> None:
        assert self.windows is not None
        self.size, self.number = size, number
        is_own = size == self.windows.micro_batch_size
        self.change = dataclasses.replace(self.change, batch_size=None if is_own else size)
        self.windows.divide(trainer, micro_batch_size=size, num_micro_batches=number)
