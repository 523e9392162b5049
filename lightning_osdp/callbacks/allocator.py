"""What the caching allocator of a CUDA device says of batches that train.

[Unvalidated on CUDA: written after torch's sources, and tested with numbers in place of the allocator.]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


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
        self._retries_before = self._stats()["num_alloc_retries"]

    def stop(self) -> None:
        """The batch ends, if one has begun. Memory is allocated ahead of the device: nothing waits for it."""
        if self._retries_before is None:
            return
        stats, before = self._stats(), self.peaks
        allocated_bytes = stats["allocated_bytes"]["all"]["peak"]
        self.peaks = AllocatorPeaks(
            requested_bytes=max(before.requested_bytes, stats["requested_bytes"]["all"]["peak"] or allocated_bytes),
            active_bytes=max(before.active_bytes, stats["active_bytes"]["all"]["peak"] or allocated_bytes),
            reserved_bytes=max(before.reserved_bytes, stats["reserved_bytes"]["all"]["peak"]),
            num_retries=before.num_retries + stats["num_alloc_retries"] - self._retries_before,
        )
        self._retries_before = None

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self._device)
        return stats
