"""What the ranks of a job do at the same time while they profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Together(Protocol):
    """Runs something on every rank once all have come to it; called in the same order everywhere."""

    def __call__(self, work: Callable[[], T], /, *, stage: str) -> Sequence[T]:
        """What it returned on each rank, by rank; where it raises on one rank, every rank raises.

        Args:
            work: what to run; what it returns is sent to the other ranks.
            stage: what it is for; the same on every rank.
        """


def alone(work: Callable[[], T], /, *, stage: str) -> Sequence[T]:
    """On this rank, whatever others do."""
    return [work()]
