"""What the project promises of a measured number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a measured number must stay below."""

    name: str
    limit: float
    measured: float

    @property
    def is_met(self) -> bool:
        """Whether the measured number is below its limit."""
        return self.measured < self.limit

    def __str__(self) -> str:
        outcome = "met" if self.is_met else "MISSED"
        return f"{self.name}: {self.measured:.3g}, target below {self.limit:g}: {outcome}"
