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
from rich.console import Console, RenderableType
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_osdp.core.plan import Plan
from lightning_osdp.profiler import LiveBytes
from lightning_osdp.report import comparison_table

_WARM_UP_STEPS = 2
"""Optimizer steps that are not measured: allocations, optimizer state and first-call work happen in them."""
_KEPT_STEPS = 1000
"""Latest step times that the median is taken over."""


@dataclass(frozen=True)
class Measured:
    """What was measured on this rank; None where training was too short."""

    step_time_s: float | None = None
    peak_bytes: int | None = None
    num_steps: int = 0


class PredictionCheck(pl.Callback):
    """Measures the plan's predictions, and prints both when fit ends.

    Median seconds of an optimizer step (validation, logging and loading apart), and the peak of live bytes: on CPU
    counted in one step, the first after warming up, which is left out of the times because
    counting slows it down; on CUDA the allocator's own peak from that step on.

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
        self._steps = 0
        self._global_step = 0
        self._live: LiveBytes | None = None
        self._peak_bytes: int | None = None

    @property
    def measured(self) -> Measured:
        """What has been measured so far."""
        return Measured(
            step_time_s=median(self._times_s) if self._times_s else None,
            peak_bytes=self._peak_bytes,
            num_steps=len(self._times_s),
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
        if self._steps == _WARM_UP_STEPS and self._live is None and self._peak_bytes is None:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            else:
                self._live = LiveBytes(device.type)
                self._live.__enter__()
                self._live.track(_living(trainer, batch))
        elif self._live is not None:
            # A later micro-batch of the step that is counted: the batch is new.
            self._live.track(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._start_s = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._in_step_s += time.perf_counter() - self._start_s
        if trainer.global_step == self._global_step:
            return  # gradients accumulate: the optimizer step is yet to come
        self._global_step = trainer.global_step
        counted = self._live is not None
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._peak_bytes, self._live = self._live.peak_bytes, None
        elif device.type == "cuda" and self._steps >= _WARM_UP_STEPS:
            self._peak_bytes = torch.cuda.max_memory_allocated(device)
        if self._steps >= _WARM_UP_STEPS and not counted:
            self._times_s.append(self._in_step_s)
        self._steps += 1
        self._in_step_s = 0.0

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            Console().print(self.comparison())

    def comparison(self) -> RenderableType:
        """Table of what was predicted beside what was measured on this rank."""
        measured = self.measured
        samples = self._plan.micro_batch_size * self._plan.num_micro_batches * self._plan.world_size
        too_short = f"fewer than {_WARM_UP_STEPS + 2} optimizer steps"
        return comparison_table(
            self._plan,
            step_time_s=measured.step_time_s,
            samples_per_s=samples / measured.step_time_s if measured.step_time_s else None,
            peak_bytes=measured.peak_bytes,
            reasons=dict.fromkeys(("step_time_s", "samples_per_s", "peak_bytes"), too_short),
        )

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None


def _living(trainer: pl.Trainer, batch: Any) -> Iterable[Tensor]:
    """Tensors that live when a step starts: shards, their gradients, optimizer state, buffers, the batch."""
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
    yield from (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
