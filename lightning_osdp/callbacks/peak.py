"""The peak of live bytes in a training step: counted on CPU, the caching allocator's own on CUDA.

What is alive in a step is of two groups. The plan predicts one of them: model, gradients, optimizer state, averages,
the batch, and what the step makes. The other is all else that has come alive since the fit began, whoever holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_osdp.optimizers import states_of
from lightning_osdp.profiler import Census, LiveBytes

T = TypeVar("T", bound=pl.Callback)

WARM_UP_STEPS = 2
"""Optimizer steps that are not measured: allocations, optimizer state and first-call work happen in them."""
COUNTED_STEPS = 3
"""Steps after them whose live bytes are counted on CPU, as later ones are with a batch larger than any of theirs.

Counting is slow, so nothing else is measured in them. Of steps with batches of one size the least peak is taken: a
thread of gloo may hold a tensor of the last collective a moment longer than the step does."""


class PeakCounter:
    """Peak of live bytes on this rank, in the steps after `WARM_UP_STEPS`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocator = AllocatorWatch(device) if device.type == "cuda" else None
        self._live: LiveBytes | None = None
        self._peaks_bytes: dict[int, list[int]] = {}
        self._others_bytes: list[int] = []
        self._num_elements = 0
        self.steps: Sequence[int] = ()
        """Numbers of the steps that were counted, from one."""

    @property
    def peak_bytes(self) -> int | None:
        """The peak, so far on CUDA; None before it is known. On CPU it is of what the plan predicts."""
        return max(map(min, self._peaks_bytes.values()), default=None)

    @property
    def allocator(self) -> AllocatorPeaks | None:
        """What else the allocator says of the same steps; None on CPU, and before there are any."""
        return None if self._allocator is None or not self._peaks_bytes else self._allocator.peaks

    @property
    def other_bytes(self) -> int | None:
        """What lived beside that in the counted steps, at most; None where it is not counted."""
        return max(self._others_bytes, default=None)

    @property
    def is_counting(self) -> bool:
        """Whether the step that goes on is slowed down by counting."""
        return self._live is not None

    def start(self, trainer: pl.Trainer, batch: Any, *, num_steps: int) -> None:
        """A batch begins after so many optimizer steps."""
        self.stop()  # of a batch that was skipped nobody says that it ends
        if self._allocator is not None and num_steps >= WARM_UP_STEPS:
            self._allocator.start()
        num_elements = elements_in(batch) if self._device.type == "cpu" else 0
        is_larger = bool(self._peaks_bytes) and num_elements > max(self._peaks_bytes)
        is_counted = is_larger or WARM_UP_STEPS <= num_steps < WARM_UP_STEPS + COUNTED_STEPS
        if self._live is None and self._device.type == "cpu" and is_counted:
            self._live = LiveBytes(self._device.type)
            self._live.track(planned_tensors(trainer))
            others = other_tensors(trainer, besides=tensors_in(batch))
            self._others_bytes.append(sum(other.untyped_storage().nbytes() for other in others))
        if self._live is not None:
            self._num_elements = max(self._num_elements, num_elements)
            self._live.track(tensors_in(batch))
            self._live.__enter__()

    def stop(self) -> None:
        """The batch ends, or training does: between micro-batches the loader works, whose tensors do not count."""
        if self._live is not None and self._live.is_active:
            self._live.__exit__(None, None, None)
        if self._allocator is not None:
            self._allocator.stop()

    def end_step(self, *, num_steps: int) -> None:
        """The batches since the last call were one optimizer step, after so many others."""
        if self._live is not None:
            self._peaks_bytes.setdefault(self._num_elements, []).append(self._live.peak_bytes)
            self.steps = (*self.steps, num_steps + 1)
            self._live, self._num_elements = None, 0
        elif num_steps >= WARM_UP_STEPS and self._allocator is not None:
            self._peaks_bytes = {0: [self._allocator.peaks.requested_bytes]}
            self.steps = range(WARM_UP_STEPS + 1, num_steps + 2)


@dataclass(frozen=True, kw_only=True)
class AllocatorPeaks:
    """The most over some batches; what lies between batches, such as validation and checkpoints, does not count."""

    requested_bytes: int = 0
    """Asked for at once: what plans predict. Tensors that were freed, but that another stream still reads, count."""
    active_bytes: int = 0
    """The same with the allocator's rounding."""
    reserved_bytes: int = 0
    """Taken of the device, in use or not."""
    num_retries: int = 0
    """How often memory was short until the allocator had given back all that it cached; everything waits for that."""


class AllocatorWatch:
    """Peaks of a CUDA device's allocator, each batch by itself; `peaks` has what was found so far.

    The allocator's own peaks begin anew with each batch, also for others who read them.
    [Unvalidated on CUDA: written after torch's sources, and tested with numbers in place of the allocator.]

    References:
        torch/cuda/memory.py (``memory_stats``) names and explains the numbers. Where the allocator is CUDA's own
        (``backend:cudaMallocAsync``), it knows of what is allocated and reserved only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries_before: int | None = None  # while a batch runs
        self.peaks = AllocatorPeaks()

    def start(self) -> None:
        """A batch begins."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._retries_before = torch.cuda.memory_stats_as_nested_dict(self._device)["num_alloc_retries"]

    def stop(self) -> None:
        """The batch ends, if one has begun. Memory is allocated ahead of the device: nothing waits for it."""
        if self._retries_before is None:
            return
        stats, before = torch.cuda.memory_stats_as_nested_dict(self._device), self.peaks
        allocated_bytes = stats["allocated_bytes"]["all"]["peak"]
        self.peaks = AllocatorPeaks(
            requested_bytes=max(before.requested_bytes, stats["requested_bytes"]["all"]["peak"] or allocated_bytes),
            active_bytes=max(before.active_bytes, stats["active_bytes"]["all"]["peak"] or allocated_bytes),
            reserved_bytes=max(before.reserved_bytes, stats["reserved_bytes"]["all"]["peak"]),
            num_retries=before.num_retries + stats["num_alloc_retries"] - self._retries_before,
        )
        self._retries_before = None


def living_tensors(model: nn.Module | None, optimizers: Iterable[Any]) -> Iterable[Tensor]:
    """Tensors that live between steps: shards, their gradients, state of the optimizers, buffers."""
    assert model is not None
    for parameter in model.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for optimizer in optimizers:
        assert isinstance(optimizer, Optimizer)
        yield from tensors_in([list(state.values()) for state in states_of(optimizer)])


def planned_tensors(trainer: pl.Trainer) -> Iterator[Tensor]:
    """Tensors that live between the steps of a fit and that its plan predicts: `living_tensors` and averages."""
    yield from living_tensors(trainer.model, trainer.optimizers)
    for callback in callbacks_of(trainer, WeightAveraging):
        if callback._average_model is not None:
            yield from living_tensors(callback._average_model, ())


def other_tensors(trainer: pl.Trainer, *, besides: Iterable[Tensor] = ()) -> list[Tensor]:
    """One tensor of each storage that has come alive since the fit began and that its plan does not predict.

    Callbacks and modules keep such tensors, and loaders have read ahead. Empty where the strategy took no census.
    `besides` are left out, such as the batch.
    """
    census = getattr(trainer.strategy, "census", None)
    if not isinstance(census, Census):
        return []
    return census.newer(besides=[*planned_tensors(trainer), *besides])


def all_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """The list that a Trainer goes through."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def callbacks_of(trainer: pl.Trainer, kind: type[T]) -> list[T]:
    """Those of this kind that a Trainer has."""
    return [callback for callback in all_callbacks(trainer) if isinstance(callback, kind)]


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Those in nested lists, tuples and dicts."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def elements_in(values: Any) -> int:
    """How many numbers they have."""
    return sum(tensor.numel() for tensor in tensors_in(values))
