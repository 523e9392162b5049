"""What one rank does in one optimizer step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Samples of one rank."""

    micro_batch_size: int
    """b: samples per rank and micro-batch."""
    num_micro_batches: int = 1
    """K: micro-batches per optimizer step."""

    @property
    def num_samples(self) -> int:
        """Of an optimizer step, b * K."""
        return self.micro_batch_size * self.num_micro_batches
