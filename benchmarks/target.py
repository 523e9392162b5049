"""What the project promises of a measured number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a measured number must stay below, or reach."""

    name: str
    limit: float
    measured: float
    is_least: bool = False
    """Whether the limit is to be reached instead."""

    @property
    def is_met(self) -> bool:
        """Whether the measured number is below its limit, or reaches it."""
        return self.measured >= self.limit if self.is_least else self.measured < self.limit

    def __str__(self) -> str:
        outcome = "met" if self.is_met else "MISSED"
        bound = "at least" if self.is_least else "below"
        return f"{self.name}: {self.measured:.3g}, target {bound} {self.limit:g}: {outcome}"
