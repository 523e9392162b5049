"""The sweep over micro-batch sizes: bracketed, and refined where a bound leaves a better one possible.

A larger size leaves less memory, so whatever fits there fits at a smaller one. A bound at one size therefore bounds all
larger ones (`assign.bound_later_s`). Where nothing overlaps, step times grow by what there is more to compute:

    time_s(b)  >=  bound_s(b') + (compute_s(b) - compute_s(b'))      for b > b'

Samples/s are no unimodal function of b, since they drop wherever another unit has to be sharded; what this bound
leaves open between two sizes is tried, until no size can be better by more than `TOLERANCE`.

Where the samples of a step are given, the sizes are those that make them up in whole micro-batches, and all are tried.

At each size all settings compete: prefetch settings, units of an operator or of a block, and slices of operators.

References:
    OSDP (Jiang et al. 2022), equation 1 and algorithm 1. Deviation: the paper tries b = 1, 2, 3, ... up to the first
    that does not fit; here that one is bracketed by doubling, and sizes that cannot be best are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import attrgetter

from lightning_osdp.assign import (
    NO_GAIN,
    Assignment,
    Setting,
    assign_modes,
    block_units,
    chosen_activations,
    ever_more_slices,
    fill_spare,
    share_units,
    with_blocks,
)
from lightning_osdp.core.duration import three_digits
from lightning_osdp.core.progress import Progress, silent
from lightning_osdp.scheduler.candidate import Candidate

TOLERANCE = 1e-3
"""Fraction of samples/s by which some size may be better than the one that is chosen."""

WORTH_CHANGING = 0.01
"""Fraction of samples/s for which another size takes the place of the one that is there."""

MAX_SIZES = 64
"""Sizes that a sweep assigns modes for; past them the best of those is chosen."""


def _time_s(assigned: tuple[Setting, Assignment]) -> float:
    return assigned[1].step_time_s


class Sweep:
    """Micro-batch sizes with their best assignment, each searched once.

    Args:
        settings: that compete; of equally fast ones the first is chosen.
        limit_bytes: the most bytes that may live on one rank.
        search: name of a solver in ``search.SOLVERS``.
        shares: whether units of blocks compete, too.
        slices: numbers of slices that an operator may be split into.
        activations: what blocks may do with what they save.
        samples_per_step: samples of a rank and optimizer step that every size makes up, in as many micro-batches as
            that takes; None: the number of micro-batches is that of the settings.
        progress: called with each size that is tried.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        *,
        limit_bytes: int,
        search: str,
        shares: bool,
        slices: Sequence[int] = (1,),
        activations: Sequence[str] = ("keep",),
        samples_per_step: int | None = None,
        progress: Progress = silent,
    ) -> None:
        self._slices, self.activations = slices, tuple(activations)
        self._samples_per_step = samples_per_step
        self._settings, self._limit_bytes, self._search, self._shares = settings, limit_bytes, search, shares
        self._progress = progress
        self._candidates: dict[int, Candidate] = {}
        self._open: dict[tuple[int, int], float] = {}

    def _at(self, setting: Setting, micro_batch_size: int) -> Setting:
        samples = self._samples_per_step
        return setting.at(micro_batch_size, None if samples is None else samples // micro_batch_size)

    def smallest(self, micro_batch_size: int) -> Setting:
        """The setting that needs the fewest bytes at this size; with operators split where it would not fit else."""
        settings = [self._at(setting, micro_batch_size) for setting in self._settings]
        best = min(settings, key=attrgetter("least_bytes"))
        for found in (self._recomputing(best), self._split(best)):
            if best.least_bytes <= self._limit_bytes:
                break
            best = min((best, *found), key=attrgetter("least_bytes"))
        return best

    def fits(self, micro_batch_size: int) -> bool:
        """Whether any assignment does."""
        return self.smallest(micro_batch_size).least_bytes <= self._limit_bytes

    def candidate(self, micro_batch_size: int) -> Candidate | None:
        """Best assignment at this size; None if none fits."""
        best = f", best {three_digits(self._best().samples_per_s)} samples/s so far" if self._candidates else ""
        self._progress("searching", f"micro-batch {micro_batch_size}{best}")
        whole = [self._at(setting, micro_batch_size) for setting in self._settings]
        found: list[tuple[Setting, Assignment]] = []
        for setting in (*whole, *self._by_block(whole)):
            found += self._assigned(setting, found)
        fastest = min(found, key=_time_s, default=None)
        if fastest is None or fastest[1].step_time_s > fastest[0].fastest_s * (1 + NO_GAIN):
            prefetch = None if fastest is None else fastest[0].backward_prefetch
            base = next(
                (each for each in whole if each.backward_prefetch == prefetch),
                min(whole, key=attrgetter("least_bytes")),
            )
            for each in self._split(base):
                found += self._assigned(each, found)
            found += self._with_recomputing(base, found)
        if not found:
            return None
        setting, assignment = min(found, key=_time_s)
        self._candidates[micro_batch_size] = Candidate(
            setting=setting,
            assignment=fill_spare(setting, assignment, limit_bytes=self._limit_bytes),
            bounds=tuple((setting, assignment.bound_s) for setting, assignment in found),
        )
        return self._candidates[micro_batch_size]

    def _by_block(self, settings: Sequence[Setting]) -> list[Setting]:
        """The same with a unit for each block, where units may be shared."""
        plain = [setting for setting in settings if self._shares and not setting.is_paper]
        return [by_block for setting in plain for by_block in block_units(setting)]

    def _split(self, setting: Setting) -> Iterator[Setting]:
        """The same with operators split, where that can help."""
        if setting.cluster.world_size == 1 or len(self._slices) == 1:
            return
        peak = setting.peak(setting.least_memory_modes)
        whole = sum(peak.parts.get(part, 0) for part in ("gathered parameters", "unsharded gradients"))
        if peak.peak_bytes - whole <= self._limit_bytes:
            yield from ever_more_slices(setting, self._slices)

    def _recomputing(self, setting: Setting) -> Iterator[Setting]:
        """The same with blocks that may save less: units of their own, and all of them, with units inside, too.

        Where units may not be shared, only with units inside.
        """
        choices = [choice for choice in self.activations if choice != "keep"]
        if setting.is_paper or not choices:
            return
        if self._shares:
            yield from block_units(setting, self.activations)
        bases = (setting, *block_units(setting)) if self._shares else (setting,)
        for choice in choices:
            chosen = {block.name: choice for block in setting.profile.blocks if choice in block.segments}
            if chosen:
                yield from (with_blocks(each, chosen) for each in bases)

    def _with_recomputing(
        self, setting: Setting, before: Sequence[tuple[Setting, Assignment]]
    ) -> list[tuple[Setting, Assignment]]:
        """The best with blocks that recompute or offload.

        First as units of their own; then, as chosen there or all of them, with units inside, which may be split.
        """
        found: list[tuple[Setting, Assignment]] = []
        tried: list[dict[str, str]] = []
        settings = list(self._recomputing(setting))
        for each in settings:
            assigned = self._assigned(each, [*before, *found])
            found += assigned
            chosen = (chosen_activations(one, assignment.modes) for one, assignment in assigned)
            tried += [blocks for blocks in chosen if blocks and blocks not in tried]
        for blocks in tried:
            fine = with_blocks(setting, blocks)
            if all(fine.blocks != each.blocks for each in settings):
                found += self._assigned(fine, [*before, *found])
            for split in self._split(fine):
                found += self._assigned(split, [*before, *found])
        return found

    def _assigned(
        self, setting: Setting, before: Sequence[tuple[Setting, Assignment]]
    ) -> list[tuple[Setting, Assignment]]:
        """The best modes of a setting, and of those that its units shared make of it where that is faster.

        Where memory is short, what keeping units saves may be less than what sharing them would have saved: so units
        are shared as if all were sharded, too.
        """
        worth_s = min(map(_time_s, before), default=math.inf)
        assignment = assign_modes(setting, limit_bytes=self._limit_bytes, search=self._search, worth_s=worth_s)
        if assignment is None:
            return []
        found = [(setting, assignment)]
        for modes in (assignment.modes, setting.least_memory_modes) if self._shares else ():
            shared, _ = share_units(setting, modes, limit_bytes=self._limit_bytes)
            if shared is not setting and all(shared.units != other.units for other, _ in found):
                worth_s = min(worth_s, *map(_time_s, found))
                again = assign_modes(shared, limit_bytes=self._limit_bytes, search=self._search, worth_s=worth_s)
                found += [] if again is None else [(shared, again)]
        return found

    def all_zdp(self, candidate: Candidate) -> tuple[float, int]:
        """Step time and peak of plain FSDP like this candidate, its units shared likewise, under the same limit."""
        prefetch, size = candidate.setting.backward_prefetch, candidate.setting.workload.micro_batch_size
        setting = next(self._at(each, size) for each in self._settings if each.backward_prefetch == prefetch)
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
            promising = max(self._open_sizes(), key=self._most_between, default=None)
            if promising is None or self._most_between(promising) <= self._best().samples_per_s * (1 + TOLERANCE):
                break
            self.candidate(sum(promising) // 2)
        return self._best() if self._candidates else None

    def best_of(self, sizes: Sequence[int]) -> Candidate | None:
        """The first of these sizes, unless another one is better by more than `WORTH_CHANGING`."""
        found = [candidate for candidate in map(self.candidate, sizes) if candidate is not None]
        if not found:
            return None
        best = self._best()
        is_worth_it = best.samples_per_s > found[0].samples_per_s * (1 + WORTH_CHANGING)
        return best if is_worth_it or found[0].setting.workload.micro_batch_size != sizes[0] else found[0]

    @property
    def most_samples_per_s(self) -> float:
        """What no plan exceeds at any size that was tried, or lies between two of them."""
        tried = [candidate.most_samples_per_s for candidate in self._candidates.values()]
        return max([*tried, *map(self._most_between, self._open_sizes())])

    def _best(self) -> Candidate:
        return self._candidates[max(self._candidates, key=lambda size: (self._candidates[size].samples_per_s, -size))]

    def _open_sizes(self) -> list[tuple[int, int]]:
        """Sizes that were tried, with others between them that may be chosen."""
        if self._samples_per_step is not None:
            return []
        return [pair for pair in pairwise(sorted(self._candidates)) if pair[1] - pair[0] > 1]

    def _most_between(self, pair: tuple[int, int]) -> float:
        """Samples/s that no size between these two exceeds: those of the last one at the bound of the first."""
        if pair not in self._open:
            self._open[pair] = self._candidates[pair[0]].most_later(pair[1] - 1)
        return self._open[pair]
