"""Measures what the plan predicted: step time, samples/s and peak memory, on rank 0."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import RenderableType
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_osdp.core.plan import Plan
from lightning_osdp.profiler import LiveBytes
from lightning_osdp.report import comparison_table, show

WARM_UP_STEPS = 2
"""Optimizer steps that are not measured: allocations, optimizer state and first-call work happen in them."""
COUNTED_STEPS = 3
"""Steps after them whose live bytes are counted on CPU; they are left out of the times, because counting is slow.

The least of their peaks is reported: a thread of gloo may hold a tensor of the last collective a moment longer than
the step does."""
_KEPT_STEPS = 1000
"""Latest step times that the median is taken over."""


@dataclass(frozen=True)
class Measured:
    """What was measured on this rank; None where training was too short."""

    step_time_s: float | None = None
    peak_bytes: int | None = None


class PredictionCheck(pl.Callback):
    """Measures the plan's predictions, and prints both when fit ends.

    Step time is the median over optimizer steps, without loading, validation and logging. Peak memory is counted
    exactly on CPU, and is the caching allocator's own peak of allocated bytes on CUDA.

    Args:
        plan: what was predicted.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reset()

    def _reset(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._in_step_s = 0.0
        self._start_s = 0.0
        self._num_steps = 0
        self._global_step = 0
        self._live: LiveBytes | None = None
        self._peaks_bytes: list[int] = []

    @property
    def measured(self) -> Measured:
        """What has been measured so far."""
        return Measured(
            step_time_s=median(self._times_s) if self._times_s else None,
            peak_bytes=min(self._peaks_bytes, default=None),
        )

    def comparison(self) -> RenderableType:
        """Table of what was predicted beside what was measured on this rank."""
        step_time_s = self.measured.step_time_s
        samples = self._plan.micro_batch_size * self._plan.num_micro_batches * self._plan.world_size
        too_short = f"only {self._num_steps} optimizer steps"
        return comparison_table(
            self._plan,
            step_time_s=step_time_s,
            samples_per_s=samples / step_time_s if step_time_s else None,
            peak_bytes=self.measured.peak_bytes,
            reasons=dict.fromkeys(("step_time_s", "samples_per_s", "peak_bytes"), too_short),
        )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reset()
        self._global_step = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        device = trainer.strategy.root_device
        is_counted = WARM_UP_STEPS <= self._num_steps < WARM_UP_STEPS + COUNTED_STEPS
        if is_counted and device.type == "cpu":
            if self._live is None:
                self._live = LiveBytes(device.type)
                self._live.track(_living(trainer))
            self._live.track(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
            self._live.__enter__()
        elif is_counted and not self._peaks_bytes:
            torch.cuda.reset_peak_memory_stats(device)
        _synchronize(device)
        self._start_s = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        device = trainer.strategy.root_device
        _synchronize(device)
        self._in_step_s += time.perf_counter() - self._start_s
        if self._live is not None:
            # Between micro-batches the loader works, whose tensors the limit is not about.
            self._live.__exit__(None, None, None)
        if trainer.global_step == self._global_step:
            return  # gradients accumulate: the optimizer step is yet to come
        self._end_step(device)
        self._global_step = trainer.global_step

    def _end_step(self, device: torch.device) -> None:
        if self._live is not None:
            self._peaks_bytes.append(self._live.peak_bytes)
            self._live = None
        elif self._num_steps >= WARM_UP_STEPS:
            if device.type != "cpu":
                self._peaks_bytes = [torch.cuda.max_memory_allocated(device)]
            self._times_s.append(self._in_step_s)
        self._num_steps += 1
        self._in_step_s = 0.0

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            show(self.comparison())

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._live is not None and self._live.is_active:
            self._live.__exit__(None, None, None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _living(trainer: pl.Trainer) -> Iterable[Tensor]:
    """Tensors that live between steps: shards, their gradients, optimizer state, buffers."""
    assert trainer.model is not None
    for parameter in trainer.model.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from trainer.model.buffers()
    for optimizer in trainer.optimizers:
        assert isinstance(optimizer, Optimizer)
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
