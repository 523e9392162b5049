"""What a decision costs: the value that every term returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Seconds per optimizer step, and bytes that add up over units."""

    time_s: float = 0.0
    memory_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        """Both costs together."""
        return Cost(self.time_s + other.time_s, self.memory_bytes + other.memory_bytes)
