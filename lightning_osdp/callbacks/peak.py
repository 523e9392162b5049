"""The peak of live bytes in a training step: counted on CPU, the allocator's own on CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_osdp.profiler import LiveBytes

WARM_UP_STEPS = 2
"""Optimizer steps that are not measured: allocations, optimizer state and first-call work happen in them."""
COUNTED_STEPS = 3
"""Steps after them whose live bytes are counted on CPU. Counting is slow, so nothing else is measured in them.

The least of their peaks is reported: a thread of gloo may hold a tensor of the last collective a moment longer than
the step does."""


class PeakCounter:
    """Peak of live bytes on this rank, in the steps after `WARM_UP_STEPS`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live: LiveBytes | None = None
        self._peaks_bytes: list[int] = []

    @property
    def peak_bytes(self) -> int | None:
        """The peak, so far on CUDA; None before it is known."""
        return min(self._peaks_bytes, default=None)

    def is_counting(self, num_steps: int) -> bool:
        """Whether the step after so many is slowed down by counting."""
        return self._device.type == "cpu" and WARM_UP_STEPS <= num_steps < WARM_UP_STEPS + COUNTED_STEPS

    def start(self, trainer: pl.Trainer, batch: Any, *, num_steps: int) -> None:
        """A batch begins after so many optimizer steps."""
        if self.is_counting(num_steps):
            if self._live is None:
                self._live = LiveBytes(self._device.type)
                self._live.track(living_tensors(trainer.model, trainer.optimizers))
                for average in _averages(trainer):
                    self._live.track(living_tensors(average, ()))
            self._live.track(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
            self._live.__enter__()
        elif num_steps == WARM_UP_STEPS and self._device.type == "cuda" and not self._peaks_bytes:
            torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        """The batch ends, or training does: between micro-batches the loader works, whose tensors do not count."""
        if self._live is not None and self._live.is_active:
            self._live.__exit__(None, None, None)

    def end_step(self, *, num_steps: int) -> None:
        """The batches since the last call were one optimizer step, after so many others."""
        if self._live is not None:
            self._peaks_bytes.append(self._live.peak_bytes)
            self._live = None
        elif num_steps >= WARM_UP_STEPS and self._device.type == "cuda":
            # Python allocates ahead of the device: no need to wait for it
            self._peaks_bytes = [torch.cuda.max_memory_allocated(self._device)]


def living_tensors(model: nn.Module | None, optimizers: Iterable[Any]) -> Iterable[Tensor]:
    """Tensors that live between steps: shards, their gradients, optimizer state, buffers.

    Args:
        model: the wrapped model.
        optimizers: those that update it.
    """
    assert model is not None
    for parameter in model.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for optimizer in optimizers:
        assert isinstance(optimizer, Optimizer)
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _averages(trainer: pl.Trainer) -> Iterator[nn.Module]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            yield callback._average_model
