"""Peak of live bytes in a training step: counted on CPU, reported by the caching allocator on CUDA.

Live tensors are of two groups. The plan predicts the first: model, gradients, optimizer state, averages, the batch, and
tensors that the step makes. The second are all other tensors that were made since the fit began.
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

from lightning_osdp.apply import host_rows_of, local, whole_storages
from lightning_osdp.operations.optimizers import states_of
from lightning_osdp.profiler import Census, LiveBytes, tensors_in

T = TypeVar("T", bound=pl.Callback)

WARM_UP_STEPS = 2
"""Number of first optimizer steps that are not measured: first calls allocate, and optimizers make their states."""
COUNTED_STEPS = 3
"""Number of steps after warm-up whose live bytes are counted on CPU; later steps are, too, if their batch is larger.

Counting is slow, so nothing else is measured in these steps. The least peak of steps with equal batches, and as many of
them, is taken: a thread of gloo may hold a tensor of the last collective a moment longer than the step does.
"""


class PeakCounter:
    """Counter of the peak of live bytes on this rank, in the steps after `WARM_UP_STEPS`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocator = AllocatorWatch(device) if device.type == "cuda" else None
        self._live: LiveBytes | None = None
        self._peaks_bytes: dict[tuple[int, int], list[int]] = {}
        """Peaks of steps by elements of their largest batch, and the number of their batches: an epoch's last step may
        have fewer."""
        self._unplanned_bytes: list[int] = []
        self._num_elements, self._num_batches = 0, 0
        self.steps: Sequence[int] = ()
        """Numbers, from one, of the steps that were counted."""

    @property
    def peak_bytes(self) -> int | None:
        """Peak so far; None before a step was counted. On CPU it has the tensors that the plan predicts only."""
        return max(map(min, self._peaks_bytes.values()), default=None)

    @property
    def allocator(self) -> AllocatorPeaks | None:
        """Other numbers of the allocator for these steps; None on CPU, and before there are any."""
        return None if self._allocator is None or not self._peaks_bytes else self._allocator.peaks

    @property
    def other_bytes(self) -> int | None:
        """Most bytes alive before a counted step that the plan does not predict; None if nothing was counted."""
        return max(self._unplanned_bytes, default=None)

    @property
    def is_counting(self) -> bool:
        """True if the current step is slowed down by counting."""
        return self._live is not None

    def start(self, trainer: pl.Trainer, batch: Any, *, num_steps: int) -> None:
        """Begins a batch, after so many optimizer steps."""
        self.stop()  # a hook may have skipped the last batch, which then does not end
        if self._allocator is not None and num_steps >= WARM_UP_STEPS:
            self._allocator.start()
        num_elements = elements_in(batch) if self._device.type == "cpu" else 0
        is_larger = bool(self._peaks_bytes) and num_elements > max(self._peaks_bytes)[0]
        is_counted = is_larger or WARM_UP_STEPS <= num_steps < WARM_UP_STEPS + COUNTED_STEPS
        if self._live is None and self._device.type == "cpu" and is_counted:
            self._live = LiveBytes(self._device.type)
            self._live.leave_out(host_tensors(trainer))
            self._live.track(planned_tensors(trainer))
            unplanned = unplanned_tensors(trainer, besides=tensors_in(batch))
            self._unplanned_bytes.append(sum(t.untyped_storage().nbytes() for t in unplanned))
        if self._live is not None:
            self._num_elements = max(self._num_elements, num_elements)
            self._num_batches += 1
            assert trainer.model is not None
            self._live.track(whole_storages(trainer.model))  # what was freed between two micro-batches was not seen
            self._live.track(tensors_in(batch))
            self._live.__enter__()

    def stop(self) -> None:
        """Ends a batch, or training; the tensors that a loader makes between micro-batches do not count."""
        if self._live is not None and self._live.is_active:
            self._live.__exit__(None, None, None)
        if self._allocator is not None:
            self._allocator.stop()

    def end_step(self, *, num_steps: int) -> None:
        """Ends an optimizer step, after so many others, that had all batches since the last call."""
        if self._live is not None:
            key = self._num_elements, self._num_batches
            self._peaks_bytes.setdefault(key, []).append(self._live.peak_bytes)
            self.steps = (*self.steps, num_steps + 1)
            self._live, self._num_elements, self._num_batches = None, 0, 0
        elif num_steps >= WARM_UP_STEPS and self._allocator is not None:
            self._peaks_bytes = {(0, 0): [self._allocator.peaks.requested_bytes]}
            self.steps = range(WARM_UP_STEPS + 1, num_steps + 2)


@dataclass(frozen=True, kw_only=True)
class AllocatorPeaks:
    """Peaks of the CUDA caching allocator over batches; validation and checkpoints between batches do not count."""

    requested_bytes: int = 0
    """Most bytes requested at once, which plans predict; a freed tensor counts while another stream reads it."""
    active_bytes: int = 0
    """Most requested bytes with the allocator's rounding."""
    reserved_bytes: int = 0
    """Most bytes taken from the device, in use or not."""
    num_retries: int = 0
    """Number of times that the allocator had to return its cache to the device for memory, which blocks the device."""


class AllocatorWatch:
    """Watch of the allocator's peaks on a CUDA device, by batch; the attribute `peaks` has the largest so far.

    The watch resets the allocator's own peaks at the beginning of each batch, for all who read them.
    [Unvalidated on CUDA: written after torch's sources, and tested with numbers in place of the allocator.]

    References:
        torch/cuda/memory.py (``memory_stats``) names and explains the numbers. CUDA's own allocator
        (``backend:cudaMallocAsync``) reports allocated and reserved bytes only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries_before: int | None = None  # None between batches
        self.peaks = AllocatorPeaks()

    def start(self) -> None:
        """Begins a batch."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._retries_before = torch.cuda.memory_stats_as_nested_dict(self._device)["num_alloc_retries"]

    def stop(self) -> None:
        """Ends the batch, if one has begun; does not wait for the device, since memory is allocated ahead of it."""
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
    """Yields tensors that live between steps: shards, resident units, gradients, optimizer states and buffers.

    States and shards on the host are left out, and gradients of these shards.
    """
    assert model is not None
    host = host_rows_of(model)
    yield from (whole for whole in whole_storages(model) if whole.untyped_storage().nbytes())
    for parameter in model.parameters():
        if host.keeps(parameter):
            continue
        yield local(parameter).data  # that of a DTensor would count as a write
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for optimizer in optimizers:
        assert isinstance(optimizer, Optimizer)
        states = (each for state in states_of(optimizer) for each in state.items())
        yield from tensors_in([fields for parameter, fields in states if not host.holds(parameter)])


def planned_tensors(trainer: pl.Trainer) -> Iterator[Tensor]:
    """Yields tensors that live between the steps of a fit and that its plan predicts: `living_tensors` and averages."""
    yield from living_tensors(trainer.model, trainer.optimizers)
    for callback in callbacks_of(trainer, WeightAveraging):
        if callback._average_model is not None:
            yield from living_tensors(callback._average_model, ())


def unplanned_tensors(trainer: pl.Trainer, *, besides: Iterable[Tensor] = ()) -> list[Tensor]:
    """Lists one tensor of each storage that was made since the fit began and that its plan does not predict.

    Callbacks and modules keep such tensors, and loaders read ahead. Tensors ``besides`` are left out, such as the
    batch, and what is in memory of the host. The list is empty where the strategy took no census.
    """
    census = getattr(trainer.strategy, "census", None)
    if not isinstance(census, Census):
        return []
    return census.newer(besides=[*planned_tensors(trainer), *host_tensors(trainer), *besides])


def host_tensors(trainer: pl.Trainer) -> list[Tensor]:
    """Tensors that a plan has in memory of the host: states, shards, and copies of shards and gradients."""
    assert trainer.model is not None
    return [*tensors_in([*host_rows_of(trainer.model).tensors(trainer.optimizers)])]


def all_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """List of callbacks that a Trainer iterates over."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    return callbacks


def callbacks_of(trainer: pl.Trainer, kind: type[T]) -> list[T]:
    """Callbacks of a class that a Trainer has."""
    return [callback for callback in all_callbacks(trainer) if isinstance(callback, kind)]


def elements_in(values: Any) -> int:
    """Number of elements of all tensors in nested values."""
    return sum(tensor.numel() for tensor in tensors_in(values))
