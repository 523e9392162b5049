"""Pace: seconds that a plan's steps took when it was accepted, beside those that they take now, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

SLOWER = 1.15
"""Seconds of a step, over those that the plan was accepted with, above which it has become slower."""
WATCHED_STEPS = 50
"""Steps whose median is compared: a few slow ones, as where another program runs for a while, are none."""
STEPS_APART = 500
"""Least steps from the time when a plan was accepted, or races were last asked for, to another race."""
ALIKE = 0.9
"""Elements of the smaller step, over those of the larger one, from which on their seconds are compared."""


@dataclass(frozen=True)
class Pace:
    """Pace of steps; of `Pace()` the steps that come first are those that the plan is accepted with."""

    accepted_s: float = 0.0
    """Seconds of a step when the plan was accepted; 0 before any step."""
    num_elements: int = 0
    """Elements in the batches of such a step."""
    latest_s: float = 0.0
    """Median seconds of the latest steps with as many elements; 0 where fewer than half of them had."""
    num_steps: int = 0
    """Steps since the plan was accepted, or races were last asked for."""

    @property
    def is_slower(self) -> bool:
        """True if the latest steps took longer than `SLOWER` times those that the plan was accepted with."""
        return 0 < SLOWER * self.accepted_s < self.latest_s

    @property
    def allows_race(self) -> bool:
        """True if the last race is long enough ago."""
        return self.num_steps >= STEPS_APART

    def after(self, steps: Sequence[tuple[float, int]]) -> Pace:
        """The pace after more steps, by the seconds and the elements of each; there must be some."""
        num_elements = self.num_elements if self.accepted_s else median_low(number for _, number in steps)
        alike = [seconds for seconds, number in steps if min(number, num_elements) >= ALIKE * max(number, num_elements)]
        if not self.accepted_s:
            return replace(self, accepted_s=median(alike), num_elements=num_elements, num_steps=len(steps))
        latest_s = median(alike) if 2 * len(alike) >= len(steps) else 0.0
        return replace(self, latest_s=latest_s, num_steps=self.num_steps + len(steps))
