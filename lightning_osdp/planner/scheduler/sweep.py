"""The sweep over micro-batch sizes: bracketed, and refined where a bound leaves a better one possible.

A larger size leaves less memory, so whatever fits there fits at a smaller one. A bound at one size therefore bounds all
larger ones (`assign.bound_later_s`). Where nothing overlaps, step times grow by what there is more to compute:

    time_s(b)  >=  bound_s(b') + (compute_s(b) - compute_s(b'))      for b > b'

and by what blocks must run again, because what they save does not fit any more (`assign.LeastSeconds`). Samples/s are
no unimodal function of b, since they drop wherever another unit has to be sharded; what these bounds leave open between
two sizes is tried, until no size can be better by more than `TOLERANCE`.

Where the samples of a step are given, the sizes are those that make them up in whole micro-batches, and all are tried.

Competitors at each size are in `competition`: of those, only settings are searched that may beat the best plan of all
sizes so far, by what is known of them at smaller sizes.

References:
    OSDP (Jiang et al. 2022), equation 1 and algorithm 1. Deviation: the paper tries b = 1, 2, 3, ... up to the first
    that does not fit; here that one is bracketed by doubling, and sizes that cannot be best are left out.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from operator import attrgetter

from lightning_osdp.core.batch_policy import MOST_SAMPLES, BatchPolicy, largest_fitting
from lightning_osdp.core.text.duration import three_digits
from lightning_osdp.core.text.progress import Progress
from lightning_osdp.planner.assign import (
    Assignment,
    LeastSeconds,
    Modes,
    Setting,
    bound_later_s,
    bound_of_larger_s,
    fill_spare,
)
from lightning_osdp.planner.scheduler.competition import Competition
from lightning_osdp.planner.scheduler.structures import WORTH_TRYING, Bound

TOLERANCE = 1e-3
"""Fraction of samples/s by which some size may be better than the one that is chosen."""

WORTH_CHANGING = 0.01
"""Fraction of samples/s for which another size takes the place of the one that is there."""

_step_time_s = attrgetter("step_time_s")

MOST_PARTS = 256
"""Parts into which the sizes between two are divided to bound each part."""

MAX_SIZES = 64
"""Sizes that a sweep assigns modes for; past them the best of those is chosen."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One micro-batch size with its best assignment."""

    assignment: Assignment
    bounds: tuple[Bound, ...]
    """All settings that were looked at."""

    @property
    def samples_per_s(self) -> float:
        """Equation 1's objective: samples of all ranks over the step time."""
        return _samples_per_s(self.assignment.setting, self.assignment.step_time_s)

    @property
    def host_bytes(self) -> int:
        """Memory of the host that a rank takes."""
        return self.assignment.setting.costs.host_bytes(self.assignment.modes)

    @property
    def most_samples_per_s(self) -> float:
        """Samples/s that no modes exceed at this size."""
        return max(_samples_per_s(each.setting, each.seconds) for each in self.bounds)

    def most_later(self, micro_batch_size: int, least: LeastSeconds) -> float:
        """Samples/s that no modes exceed at any larger size up to this one.

        Settings that were left out count with what might have followed from them.
        """
        most, own = 0.0, self.assignment.setting.workload.micro_batch_size
        parts = _parts(own + 1, micro_batch_size)
        for bound in self.bounds:
            seconds, setting = bound.with_followers_s, bound.setting
            if seconds == math.inf:
                continue
            # bounds rise with the samples, so that of a part's first size holds for all of the part
            each_s = ((last, bound_of_larger_s(setting, seconds, first, least)) for first, last in parts)
            open_to = max(_rate(setting, last, later_s) for last, later_s in each_s)
            # a bound that takes longer to find is of interest only where others leave something open
            if open_to > most:
                later_s = bound_later_s(setting, seconds, micro_batch_size=micro_batch_size)
                open_to = min(open_to, _rate(setting, micro_batch_size, later_s))
            most = max(most, open_to)
        return most


def _samples_per_s(setting: Setting, step_time_s: float) -> float:
    return _rate(setting, setting.workload.micro_batch_size, step_time_s)


def _rate(setting: Setting, micro_batch_size: int, step_time_s: float) -> float:
    """Samples/s of all ranks with micro-batches of this size."""
    samples = micro_batch_size * setting.workload.num_micro_batches * setting.cluster.world_size
    return samples / step_time_s if step_time_s > 0 else math.inf


def _parts(first: int, last: int) -> list[tuple[int, int]]:
    """Parts of a range of sizes, as first and last size: of one size each where there are few."""
    length = max(1, math.ceil((last + 1 - first) / MOST_PARTS))
    return [(start, min(start + length - 1, last)) for start in range(first, last + 1, length)]


class Sweep:
    """Micro-batch sizes with their best assignment, each searched once; of equally fast settings the first."""

    def __init__(
        self, settings: Sequence[Setting], competition: Competition, *, policy: BatchPolicy, progress: Progress
    ) -> None:
        self.competition = competition
        self._settings, self._policy, self._progress = settings, policy, progress
        self._candidates: dict[int, Candidate] = {}
        self._open: dict[tuple[int, int], float] = {}
        self._least: dict[int, LeastSeconds] = {}

    def _of_size(self, micro_batch_size: int, num_micro_batches: int | None = None) -> list[Setting]:
        if num_micro_batches is None:
            num_micro_batches = self._policy.workload(micro_batch_size).num_micro_batches
        return [setting.at(micro_batch_size, num_micro_batches) for setting in self._settings]

    def smallest(self, micro_batch_size: int) -> Setting:
        """The setting that needs the fewest bytes at this size; with operators split where it would not fit else."""
        return self.competition.smallest(self._of_size(micro_batch_size))

    def least_bytes(self, micro_batch_size: int, activations: Sequence[str]) -> int:
        """Bytes that the smallest setting of this size needs if blocks may do this with what they save."""
        offering = replace(self.competition, space=replace(self.competition.space, activations=tuple(activations)))
        return offering.smallest(self._of_size(micro_batch_size)).costs.least_bytes

    def fits(self, micro_batch_size: int, num_micro_batches: int | None = None) -> bool:
        """True where any assignment fits, in as many micro-batches as the policy has it if their number is not given.

        Where units may be sharded in nodes the closed form is no bound, so what it has fit must do so as simulated.
        """
        limit_bytes = self.competition.memory_limit_bytes
        settings = self._of_size(micro_batch_size, num_micro_batches)
        if self._least_of(settings[0]).step_s(micro_batch_size) == math.inf:
            return False
        costs = self.competition.smallest(settings).costs
        if costs.least_bytes <= limit_bytes and costs.fits(costs.least_memory_modes, limit_bytes):
            return True
        uniform = self.competition.uniform(settings)
        return any(each.ahead_for_free.costs.fits(modes, limit_bytes) for each, modes in uniform)

    def candidate(self, micro_batch_size: int) -> Candidate | None:
        """Best assignment at this size; None if none fits."""
        best = f", best {three_digits(self._best().samples_per_s)} samples/s so far" if self._candidates else ""
        self._progress("searching", f"micro-batch {micro_batch_size}{best}")
        limit_bytes, settings = self.competition.memory_limit_bytes, self._of_size(micro_batch_size)
        worth_s = self._worth_s(settings[0])
        attempt = self.competition.assigned(
            settings, worth_s=worth_s, known=self._known(micro_batch_size), least=self._least_of(settings[0])
        )
        filled: list[Assignment] = []
        if attempt.assignments:
            best_of_size = min(attempt.assignments, key=_step_time_s)
            if best_of_size.step_time_s * (1 - WORTH_TRYING) < worth_s:
                best_of_size = fill_spare(best_of_size, memory_limit_bytes=limit_bytes)
            filled.append(best_of_size)
        # with several micro-batches the closed form may exceed the peak of modes that are equal in all units
        known_s = min(worth_s / (1 - WORTH_TRYING), filled[0].step_time_s) if filled else math.inf
        uniform = self.competition.best_uniform(settings, known_s)
        bounds = attempt.bounds
        if uniform is not None:
            filled.append(fill_spare(uniform, memory_limit_bytes=limit_bytes))
            if not attempt.assignments:
                bounds = [*bounds, Bound(uniform.setting.all_ahead, uniform.bound_s)]
        if not filled:
            return None
        assigned = min(filled, key=_step_time_s)
        self._candidates[micro_batch_size] = Candidate(assignment=assigned, bounds=tuple(bounds))
        return self._candidates[micro_batch_size]

    def _worth_s(self, setting: Setting) -> float:
        """Step time of a setting's workload that has the samples/s of the best one so far."""
        if not self._candidates:
            return math.inf
        return setting.workload.num_samples * setting.cluster.world_size / self._best().samples_per_s

    def _least_of(self, setting: Setting) -> LeastSeconds:
        """Least seconds of any plan of the model with as many micro-batches as a setting has."""
        number, competition = setting.workload.num_micro_batches, self.competition
        if number not in self._least:
            choices, limit_bytes = competition.space.saves, competition.memory_limit_bytes
            self._least[number] = LeastSeconds(setting, choices, memory_limit_bytes=limit_bytes)
        return self._least[number]

    def _known(self, micro_batch_size: int) -> dict[Hashable, Bound]:
        """Bounds of settings at the largest smaller size that was tried with them, by key."""
        found: dict[Hashable, Bound] = {}
        for size in sorted(size for size in self._candidates if size < micro_batch_size):
            found |= {bound.setting.key: bound for bound in self._candidates[size].bounds}
        return found

    def plain(self, candidate: Candidate) -> tuple[Setting, Modes]:
        """The fastest plain FSDP that fits, of all sizes that were tried and the candidate's, with its prefetching.

        Where any size may be chosen, it is also that of the largest sizes that fit. Where none fits, it is the one that
        needs the fewest bytes. Its units are shared likewise.
        """
        own, memory_limit_bytes = candidate.assignment.setting, self.competition.memory_limit_bytes

        @cache
        def of_size(size: int) -> list[tuple[Setting, Modes]]:
            settings = (each for each in self._of_size(size) if each.engine == own.all_ahead.engine)
            return [plain for setting in settings for plain in self.competition.plain(setting)]

        def peak_bytes(plain: tuple[Setting, Modes]) -> int:
            return plain[0].costs.exact_peak_bytes(plain[1])

        def fits(number: int, size: int) -> bool:
            return peak_bytes(of_size(size)[number]) <= memory_limit_bytes

        sizes = dict.fromkeys((*self._candidates, own.workload.micro_batch_size))
        if not self._policy.micro_batch_sizes:
            largest = [largest_fitting(partial(fits, number), max(sizes)) for number in range(len(of_size(1)))]
            sizes |= dict.fromkeys(size for size in largest if size)
        found = [plain for size in sizes for plain in of_size(size)]
        fastest = sorted(
            found, key=lambda each: _samples_per_s(each[0], each[0].costs.step_time_s(each[1])), reverse=True
        )
        best = next((each for each in fastest if peak_bytes(each) <= memory_limit_bytes), None)
        return min(found, key=peak_bytes) if best is None else self.competition.shared(*best)

    def best(self) -> Candidate | None:
        """The best of the micro-batches that there may be; None if none fits."""
        sizes, most = self._policy.micro_batch_sizes, self._policy.max_micro_batch_size
        return self._best_of(sizes) if sizes else self._best_up_to(MOST_SAMPLES if most is None else most)

    def _best_up_to(self, most: int) -> Candidate | None:
        """Candidate with the best samples/s, to `TOLERANCE`; between equal ones the smallest size."""
        largest = largest_fitting(self.fits, most)
        for size in sorted({1, largest} - {0}):
            self.candidate(size)
        while len(self._candidates) < MAX_SIZES:
            promising = max(self._open_sizes(), key=self._most_between, default=None)
            if promising is None or self._most_between(promising) <= self._best().samples_per_s * (1 + TOLERANCE):
                break
            if self.candidate(sum(promising) // 2) is None:
                break  # sizes that are left open are in the gap
        return self._best() if self._candidates else None

    def _best_of(self, sizes: Sequence[int]) -> Candidate | None:
        """Candidate of the first size, unless another one is better by more than `WORTH_CHANGING`.

        Large sizes are mostly the best, and leave least of the others to search.
        """
        first = self.candidate(sizes[0])
        for size in sorted(sizes[1:], reverse=True):
            self.candidate(size)
        best = self._best() if self._candidates else None
        if best is None or first is None or best.samples_per_s > first.samples_per_s * (1 + WORTH_CHANGING):
            return best
        return first

    def most_samples_per_s(self, paid_s: float = 0.0) -> float:
        """Samples/s that no plan exceeds at any size that was tried, or lies between two of them.

        So many of a step's seconds do not count.
        """
        most = [(size, each.most_samples_per_s) for size, each in self._candidates.items()]
        most += [(pair[0] + 1, self._most_between(pair)) for pair in self._open_sizes()]
        return max(self._without(paid_s, *each) for each in most)

    def _without(self, paid_s: float, micro_batch_size: int, samples_per_s: float) -> float:
        """Samples/s of a step with micro-batches of at least this size, without some of its seconds."""
        num_samples = self._policy.workload(micro_batch_size).num_samples * self._settings[0].cluster.world_size
        step_s = num_samples / samples_per_s - paid_s if samples_per_s else math.inf
        return num_samples / step_s if step_s > 0 else math.inf

    def _best(self) -> Candidate:
        return self._candidates[max(self._candidates, key=lambda size: (self._candidates[size].samples_per_s, -size))]

    def _open_sizes(self) -> list[tuple[int, int]]:
        """Sizes that were tried, with others between them that may be chosen."""
        if self._policy.micro_batch_sizes:
            return []
        return [pair for pair in pairwise(sorted(self._candidates)) if pair[1] - pair[0] > 1]

    def _most_between(self, pair: tuple[int, int]) -> float:
        """Samples/s that no size between two exceeds: those of the last one at the bound of the first."""
        if pair not in self._open:
            smaller = self._candidates[pair[0]]
            least = self._least_of(self._of_size(pair[0])[0])
            self._open[pair] = smaller.most_later(pair[1] - 1, least)
        return self._open[pair]
