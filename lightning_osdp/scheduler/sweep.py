"""The sweep over micro-batch sizes: bracketed, and refined where a bound leaves a better one possible.

Step times are linear in b but for the communication, which the best modes never make cheaper at a larger b, where
less memory is left for it. So a bound at one size bounds all larger ones:

    time_s(b)  >=  bound_s(b') + (fastest_s(b) - fastest_s(b'))      for b > b'       (fastest_s: memory no concern)

Samples/s are no unimodal function of b, since they drop wherever another unit has to be sharded; what this bound
leaves open between two sizes is tried, until no size can be better by more than `TOLERANCE`.

References:
    OSDP (Jiang et al. 2022), equation 1 and algorithm 1. Deviation: the paper tries b = 1, 2, 3, ... up to the first
    that does not fit; here that one is bracketed by doubling, and sizes that cannot be best are left out.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import pairwise

from lightning_osdp.assign import Assignment, Setting, assign_modes, share_units
from lightning_osdp.core.duration import three_digits
from lightning_osdp.core.progress import Progress, silent

TOLERANCE = 1e-3
"""Fraction of samples/s by which some size may be better than the one that is chosen."""

MAX_SIZES = 64
"""Sizes that a sweep assigns modes for; past them the best of those is chosen."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One micro-batch size with its best assignment."""

    setting: Setting
    assignment: Assignment

    @property
    def samples_per_s(self) -> float:
        """Equation 1's objective: samples of all ranks over the step time."""
        return _samples_per_s(self.setting, self.assignment.step_time_s)


def _samples_per_s(setting: Setting, step_time_s: float) -> float:
    samples = setting.workload.micro_batch_size * setting.workload.num_micro_batches * setting.cluster.world_size
    return samples / step_time_s if step_time_s > 0 else math.inf


class Sweep:
    """Micro-batch sizes with their best assignment, each searched once."""

    def __init__(
        self, setting: Setting, *, limit_bytes: int, search: str, shares: bool, progress: Progress = silent
    ) -> None:
        self._setting, self._limit_bytes, self._search, self._shares = setting, limit_bytes, search, shares
        self._progress = progress
        self._candidates: dict[int, Candidate] = {}

    def setting(self, micro_batch_size: int) -> Setting:
        """The same with another size."""
        workload = dataclasses.replace(self._setting.workload, micro_batch_size=micro_batch_size)
        return dataclasses.replace(self._setting, workload=workload)

    def fits(self, micro_batch_size: int) -> bool:
        """Whether any assignment does."""
        setting = self.setting(micro_batch_size)
        return setting.peak(setting.least_memory_modes).peak_bytes <= self._limit_bytes

    def candidate(self, micro_batch_size: int) -> Candidate | None:
        """Best assignment at this size; None if none fits."""
        best = f", best {three_digits(self._best().samples_per_s)} samples/s so far" if self._candidates else ""
        self._progress("searching", f"micro-batch {micro_batch_size}{best}")
        setting = self.setting(micro_batch_size)
        assignment = assign_modes(setting, limit_bytes=self._limit_bytes, search=self._search)
        if assignment is None:
            return None
        if self._shares:
            setting, assignment = self._share(setting, assignment)
        self._candidates[micro_batch_size] = Candidate(setting=setting, assignment=assignment)
        return self._candidates[micro_batch_size]

    def _share(self, setting: Setting, assignment: Assignment) -> tuple[Setting, Assignment]:
        """Units shared where that is faster, and modes chosen again for them; the bound stays that of the operators.

        Where memory is short, what keeping units saves may be less than what sharing them would have saved: so units
        are shared as if all were sharded, too.
        """
        found = [(setting, assignment)]
        for modes in (assignment.modes, setting.least_memory_modes):
            shared, _ = share_units(setting, modes, limit_bytes=self._limit_bytes)
            if shared is setting:
                continue
            again = assign_modes(shared, limit_bytes=self._limit_bytes, search=self._search)
            if again is not None:
                found.append((shared, dataclasses.replace(again, bound_s=assignment.bound_s)))
        return min(found, key=lambda each: each[1].step_time_s)

    def all_zdp(self, micro_batch_size: int) -> tuple[float, int]:
        """Step time and peak of plain FSDP at this size, its units shared likewise, under the same limit."""
        setting = self.setting(micro_batch_size)
        modes = setting.all_zdp_modes
        if self._shares:
            setting, modes = share_units(setting, modes, limit_bytes=self._limit_bytes)
        return setting.step_time_s(modes), setting.peak(modes).peak_bytes

    def largest(self, most: int) -> int:
        """Largest size that fits, 0 if not even one sample does: doubling to the first that does not, then halving."""
        fits, fails = 0, 1
        while fails <= most and self.fits(fails):
            fits, fails = fails, fails * 2
        fails = min(fails, most + 1)
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.fits(middle):
                fits = middle
            else:
                fails = middle
        return fits

    def best(self, most: int) -> Candidate | None:
        """Best samples/s, to `TOLERANCE`; between equal ones the smallest size."""
        largest = self.largest(most)
        for size in sorted({1, largest} - {0}):
            self.candidate(size)
        while len(self._candidates) < MAX_SIZES:
            open_sizes = [pair for pair in pairwise(sorted(self._candidates)) if pair[1] - pair[0] > 1]
            promising = max(open_sizes, key=lambda pair: self._most_samples_per_s(*pair), default=None)
            if promising is None or self._most_samples_per_s(*promising) <= self._best().samples_per_s * (
                1 + TOLERANCE
            ):
                break
            self.candidate(sum(promising) // 2)
        return self._best() if self._candidates else None

    def _best(self) -> Candidate:
        return self._candidates[max(self._candidates, key=lambda size: (self._candidates[size].samples_per_s, -size))]

    def _most_samples_per_s(self, tried: int, end: int) -> float:
        """Samples/s that no size between these two exceeds: those of the last one at the bound of the first."""
        setting, below = self.setting(end - 1), self._candidates[tried]
        more_s = setting.fastest_s - self.setting(tried).fastest_s
        return _samples_per_s(setting, min(below.assignment.bound_s, below.assignment.step_time_s) + more_s)
