"""Race: successive halving of plans by the seconds of training steps, as a value that knows whose turn is next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

COUNTED_STEPS = 2
"""Steps of a turn that count. The one before them, the first after a change, does not: what is resident is gathered
then, and the allocator meets other sizes."""
TURNS = 2
"""Turns that each racer has in a round after the first, where all have one."""
NEAR = 1.1
"""Seconds, over those of the fastest, within which a baseline stays in the race after its one counted step."""
CLEARLY = 1.5
"""Standard errors by which another racer must be faster than the first one to win.

Steps that scatter by 3% made one of four plans that were 2% slower win in 37 of 100 simulated races without that, and
in 2 with it; a plan that is 5% faster wins nearly as often.
"""
_ERROR = 1.2533 * 1.4826
"""Standard error of a median of n values, times the root of n, over the median of their distances from it."""


class Turn(NamedTuple):
    """Steps that one racer runs in a row."""

    racer: int
    num_steps: int
    """The first of them does not count."""


@dataclass(frozen=True)
class Race:
    """Race of some racers, by number; make one with `Race.of`. The first one is the plan in use.

    In each round racers take turns, then half of them goes on, the first one and the fastest others, by medians of all
    their counted steps; the first of equal ones does. When it is between two, the other one wins if it is `CLEARLY`
    faster: the first one is predicted to be, and chance alone makes one of several others fast. Turns are short, so
    that a machine that slows down for a while slows down all racers.
    """

    are_plain: tuple[bool, ...]
    """True of each racer that is a baseline: it has one counted step, and leaves unless that is `NEAR` the fastest."""
    seconds: tuple[tuple[float, ...], ...]
    """Counted steps of each racer."""
    running: tuple[int, ...]
    """Racers of this round."""
    waiting: tuple[int, ...]
    """Racers of the turns of this round that are left, in their order."""
    is_first_round: bool = True

    @classmethod
    def of(cls, are_plain: Sequence[bool]) -> Race:
        """Race of as many racers, all of which are to begin."""
        if not are_plain:
            raise ValueError("Expected at least one racer, got none.")
        everyone = tuple(range(len(are_plain)))
        waiting = everyone if len(everyone) > 1 else ()
        return cls(tuple(are_plain), ((),) * len(everyone), running=everyone, waiting=waiting)

    @property
    def turn(self) -> Turn | None:
        """The next turn; None where the race is over."""
        if not self.waiting:
            return None
        return Turn(self.waiting[0], self._num_steps(self.waiting[0]))

    @property
    def winner(self) -> int | None:
        """The racer that is left; None where the race is not over."""
        return None if self.waiting else self.running[0]

    @property
    def most_steps(self) -> int:
        """Steps that are left at most."""
        num_steps, left = sum(map(self._num_steps, self.waiting)), math.ceil(len(self.running) / 2)
        while left > 1:
            num_steps += left * TURNS * (1 + COUNTED_STEPS)
            left = math.ceil(left / 2)
        return num_steps

    def _num_steps(self, racer: int) -> int:
        """Steps of a turn of a racer in this round."""
        return 2 if self.is_first_round and self.are_plain[racer] else 1 + COUNTED_STEPS

    def median_s(self, racer: int) -> float:
        """Median of a racer's counted steps, of which it must have some."""
        return median(self.seconds[racer])

    def after(self, seconds: Sequence[float]) -> Race:
        """The race after the next turn, whose steps took these seconds, the first one included.

        Raises:
            ValueError: the race is over, or the turn has another number of steps.
        """
        turn = self.turn
        if turn is None or len(seconds) != turn.num_steps:
            raise ValueError(f"Expected the seconds of the steps of {turn}, got {len(seconds)}.")
        own = (*self.seconds[turn.racer], *seconds[1:])
        noted = (*self.seconds[: turn.racer], own, *self.seconds[turn.racer + 1 :])
        race = replace(self, seconds=noted, waiting=self.waiting[1:])
        return race if race.waiting else race._next_round()

    def without(self, racer: int) -> Race:
        """The race without the racer whose turn it is, for it cannot go on; another one must have had a turn.

        Raises:
            ValueError: it is not the racer's turn, or no other one has had any.
        """
        left = tuple(each for each in self.running if each != racer)
        if not self.waiting or self.waiting[0] != racer or not any(self.seconds[each] for each in left):
            raise ValueError(f"Expected the racer of {self.turn}, and another one that has had a turn, got {racer}.")
        waiting = tuple(each for each in self.waiting if each != racer) if len(left) > 1 else ()
        race = replace(self, running=left, waiting=waiting)
        return race if waiting else race._next_round()

    def _next_round(self) -> Race:
        medians = {racer: self.median_s(racer) for racer in self.running}
        most_s = NEAR * min(medians.values())
        others = [
            racer
            for racer in self.running
            if racer and not (self.is_first_round and self.are_plain[racer] and medians[racer] > most_s)
        ]
        others.sort(key=lambda racer: medians[racer])
        number = math.ceil((1 + len(others)) / 2)
        if number > 1:
            running = (0, *sorted(others[: number - 1]))
        else:
            running = (others[0] if others and self._is_clearly_faster(others[0]) else 0,)
        waiting = running * TURNS if len(running) > 1 else ()
        return replace(self, running=running, waiting=waiting, is_first_round=False)

    def _is_clearly_faster(self, racer: int) -> bool:
        """True if chance hardly makes a racer as much faster than the first one as it was."""
        error_s = math.hypot(self._error_s(0), self._error_s(racer))
        return self.median_s(racer) < self.median_s(0) - CLEARLY * error_s

    def _error_s(self, racer: int) -> float:
        """Standard error of the median of a racer's counted steps, by how far they scatter."""
        seconds, middle_s = self.seconds[racer], self.median_s(racer)
        return _ERROR * median(abs(each - middle_s) for each in seconds) / math.sqrt(len(seconds))
