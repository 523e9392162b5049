"""Seconds that no modes go below, and choices of blocks: in so much memory, and at larger micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.profile import BlockProfile, Crossing
from lightning_osdp.planner.assign.additive import Modes
from lightning_osdp.planner.assign.overlap import bound_overlapped
from lightning_osdp.planner.assign.paths import Paths
from lightning_osdp.planner.assign.setting import Setting
from lightning_osdp.planner.assign.solve import solve
from lightning_osdp.planner.cost import apart_s, block_s
from lightning_osdp.planner.engine import effects_of, freed_bytes
from lightning_osdp.planner.search import Choice, Group, Problem
from lightning_osdp.planner.search.bound import relax


def bound_in_s(setting: Setting, *, memory_limit_bytes: int) -> float:
    """Seconds that no modes go below that fit in so much memory, as far as they are found at once."""
    costs = setting.ahead_for_free.costs
    if setting.overlaps or costs.memory.peak_bytes(costs.least_memory_modes) > memory_limit_bytes:
        return costs.least_s
    solved = solve(costs.additive, costs.memory.room_bytes(memory_limit_bytes), search="greedy")
    return solved.bound_s - costs.root_more_s


def bound_ahead_s(setting: Setting, modes: Modes, *, memory_limit_bytes: int, search: str, enough_s: float) -> float:
    """Seconds that no modes go below that fit as if to gather ahead took no memory; more than enough is not looked for.

    Args:
        setting: a step with every unit gathered ahead that may be, whose modes with the least memory fit.
        modes: good ones, which need not fit.
        memory_limit_bytes: as of `assign_modes`.
        search: likewise.
        enough_s: seconds that are enough.
    """
    memory = setting.ahead_for_free.costs.memory
    rooms = memory.room_bytes(memory_limit_bytes)
    if setting.overlaps:
        return bound_overlapped(setting, memory, rooms, modes, search=search, enough_s=enough_s)
    solved = solve(replace(setting.costs.additive, memory=memory), rooms, search=search)
    return solved.bound_s - setting.costs.root_more_s


def bound_later_s(setting: Setting, bound_s: float, *, micro_batch_size: int) -> float:
    """Seconds that no modes go below at a larger micro-batch, of those that do not go below ``bound_s`` at this one.

    Where nothing overlaps, each choice of modes takes so much longer as there is more to compute. Where something does,
    none takes less than before, nor less than the paths of the larger micro-batch.
    """
    later = setting.at(micro_batch_size)
    if setting.overlaps:
        return max(bound_s, Paths(later).least_s())
    return bound_s + (later.costs.compute_s - setting.costs.compute_s)


_Ways: TypeAlias = tuple[tuple[Affine, Affine], ...]
"""Seconds and bytes of each way to treat something, by the samples of a micro-batch."""


class LeastSeconds:
    """Seconds that an optimizer step takes at least, whatever is a unit and what blocks do with what they save.

    At the end of forward all that is saved is alive, beside shards of weights and of optimizer states, and what units
    keep. Weights and results that do not fit have to be gathered again, made again or copied, and the more the more
    samples there are. The seconds of that are bounded by a linear relaxation over units, blocks and their choices
    (`search.bound`). Collectives count where nothing overlaps, without what it may save to share units. Where
    activations may move, what is saved is another matter: all of it is taken to fit.

    Args:
        setting: with a unit for each operator, and blocks that are still to choose for.
        choices: values of ``saves`` that are offered.
        memory_limit_bytes: most bytes that may be alive on one rank.
    """

    def __init__(self, setting: Setting, choices: Sequence[str], *, memory_limit_bytes: int) -> None:
        if setting.host_room_bytes is not None:  # other units than these may have room on the host
            setting = replace(setting, host_room_bytes=None)
        profile, cluster = setting.profile, setting.cluster
        moves = bool(setting.moving) or any(effects_of(mode).exchanges for mode in setting.modes)
        self._is_known = not (moves or setting.is_paper)
        blocks = profile.blocks if self._is_known else ()
        self._setting, self._number = setting, setting.workload.num_micro_batches
        # other units may do what these may not: frozen ones apart, and those in which a module is called again
        is_universal = all(
            len(unit.calls) == 1 and unit.trainable_bytes == unit.parameter_bytes for unit in setting.units
        )
        self._has_collectives = is_universal and not setting.overlaps
        segments_s = sum((part.forward_s + part.backward_s for part in profile.segments), ZERO)
        self._compute_s = segments_s * self._number
        self._update_s = setting.costs.optimizer_s
        self._blocks = Counter(self._ways(block, choices) for block in blocks)
        """Number of blocks that have these ways."""
        # units that have on the device what may be on the host hold that
        leaving = [effects_of(mode) for mode in setting.modes if effects_of(mode).shard_on_host]
        trained_leave = any(each.updates_on_host for each in leaving)
        hosted = bool(setting.costs.hosted)
        sharded = sum(
            (0 if leaving and (trained_leave or not each.num_trainable) else each.parameter_bytes)
            + (0 if hosted else each.optimizer_bytes)
            for each in profile
        )
        left = Affine(memory_limit_bytes - profile.buffer_bytes - sharded / cluster.world_size)
        self._left_bytes = left - profile.batch_bytes - profile.saved_bytes
        for crossing in profile.crossings:  # what several blocks save is there once
            self._left_bytes += crossing.num_bytes * (_num_savers(crossing, blocks) - 1)
        self._known: dict[tuple[int, bool], float] = {}

    def step_s(self, samples: int) -> float:
        """Seconds of a step with micro-batches of so many samples; infinite where none fits."""
        return self._compute_s.at(samples) + self._update_s + self._relaxed_s(samples, of_one=False)

    def more_s(self, samples: int, than: int) -> float:
        """Seconds by which such a step takes longer than one with smaller micro-batches in the same treatments.

        Infinite where none fits.
        """
        return (samples - than) * (self._compute_s.per_sample + self._relaxed_s(samples, of_one=True))

    def _ways(self, block: BlockProfile, choices: Sequence[str]) -> _Ways:
        """Seconds in a step that each choice of a block takes, and bytes that it saves beyond those of ``keep``."""
        ways = [(ZERO, ZERO)]
        for choice in choices:
            if choice in block.segments:
                none_s, one_s = (block_s(block, choice, self._setting.cluster, samples) for samples in (0, 1))
                freed = freed_bytes(self._setting.profile, block, choice)
                ways.append((Affine(none_s, one_s - none_s) * self._number, ZERO - freed))
        return tuple(ways)

    @cached_property
    def _units(self) -> Counter[_Ways]:
        """Number of units that have these ways: seconds of collectives, and bytes held at the end of forward."""
        units: list[_Ways] = []
        setting, costs = self._setting, self._setting.costs
        apart = apart_s(1, cluster=setting.cluster, workload=setting.workload)
        for place, (unit, options) in enumerate(zip(setting.units, costs.options, strict=True)):
            if unit.is_root and (setting.cluster.has_nodes or place in costs.hosted):
                continue  # it may be sharded in the node, or have its states on the device, whatever is offered
            ways = []
            for mode in options:
                seconds = max(0.0, costs.unit_s(unit, mode, "communication", "copies", "overhead") - apart)
                ways.append((Affine(seconds), Affine(costs.memory.held_at(len(setting.units), place, mode))))
            units.append(tuple(ways))
        return Counter(units)

    def _relaxed_s(self, samples: int, *, of_one: bool) -> float:
        """Seconds beside those of segments; or what each sample adds to them, where modes do not change."""
        known = samples, of_one
        if not self._is_known:
            return 0.0
        if known not in self._known:
            ways = self._blocks if of_one or not self._has_collectives else self._blocks + self._units
            groups = tuple(
                Group(
                    choices=tuple(
                        Choice(seconds.per_sample if of_one else seconds.at(samples), num_bytes.at(samples))
                        for seconds, num_bytes in each
                    ),
                    count=count,
                )
                for each, count in ways.items()
            )
            problem = Problem(groups=groups, budget_bytes=self._left_bytes.at(samples))
            fits = problem.least_bytes <= problem.budget_bytes
            self._known[known] = relax(problem).bound_s if fits else math.inf
        return self._known[known]


def _num_savers(crossing: Crossing, blocks: Sequence[BlockProfile]) -> int:
    """Number of blocks that may be the first to save a tensor, all that is outside of blocks being one; at least 1."""
    firsts = {savers[0] for savers in crossing.savers.values() if savers}
    owners = {next((block.name for block in blocks if block.span[0] <= first <= block.span[1]), "") for first in firsts}
    return max(1, len(owners))


def bound_of_larger_s(setting: Setting, bound_s: float, samples: int, least: LeastSeconds) -> float:
    """Seconds that no modes, nor choices of blocks, go below at a larger micro-batch of those that fit there.

    ``bound_s`` is a bound on all of them at the setting's own micro-batch.
    """
    more_s = 0.0 if setting.overlaps else least.more_s(samples, setting.workload.micro_batch_size)
    return max(bound_s + more_s, least.step_s(samples))
