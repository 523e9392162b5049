"""One sharding mode per unit, for one micro-batch size: least predicted step time with the peak under the limit.

The peak (`cost.peak_memory`) is a maximum over phases, not a sum over units, so two additive knapsacks stand in:

- a *relaxation* keeps one phase, the last operator's or the loss: every plan that fits satisfies it, so its optimum
  bounds the time of every plan from below. The certified gap is against this bound.
- the *paper's* problem adds up m_ZDP and m_DP against a budget. The budget starts at the limit less the largest
  transient, and is then moved to where the closed form just fits.

What they propose is checked against the closed form, filled up under it, and the fastest that fits is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import DP, MODES, ShardingMode
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost import Cost, PeakMemory, Workload, largest_transient_bytes, peak_memory, unit_cost
from lightning_osdp.search import SOLVERS, Choice, Group, Problem, Solution

_BUDGET_STEPS = 20
"""Halvings of the budget interval: one part in a million of it, below the size of any unit that matters."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Modes aligned with the units, with what they are predicted to cost."""

    modes: tuple[ShardingMode, ...]
    step_time_s: float
    peak: PeakMemory
    bound_s: float
    """No assignment that fits has a smaller step time."""
    note: str = ""

    @property
    def gap(self) -> float:
        """``step_time_s / bound_s - 1``."""
        return max(0.0, self.step_time_s / self.bound_s - 1) if self.bound_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything that is fixed while modes are chosen."""

    profile: ModelProfile
    units: tuple[UnitProfile, ...]
    cluster: Cluster
    workload: Workload
    modes: tuple[str, ...] = tuple(MODES)
    backward_prefetch: str = "pre"
    forward_prefetch: bool = False

    @cached_property
    def options(self) -> tuple[tuple[ShardingMode, ...], ...]:
        """Modes that each unit may take, least memory first; the root stays gathered whatever its mode."""
        offered = tuple(mode for name, mode in MODES.items() if name in self.modes)
        return tuple((DP,) if unit.is_root else offered for unit in self.units)

    @cached_property
    def costs(self) -> tuple[tuple[Cost, ...], ...]:
        """Cost of each unit in each of its `options`."""
        return tuple(
            tuple(unit_cost(unit, mode, cluster=self.cluster, workload=self.workload) for mode in options)
            for unit, options in zip(self.units, self.options, strict=True)
        )

    @cached_property
    def constant_s(self) -> float:
        """Seconds of a step that no mode changes and no unit owns: the rest of the model, and the optimizer."""
        samples = self.workload.num_micro_batches * self.workload.micro_batch_size
        trainable = sum(operator.num_trainable for operator in self.profile)
        return (
            samples * self.profile.other_s_per_sample
            + self.profile.optimizer_s_per_element * trainable / self.cluster.world_size
        )

    @cached_property
    def fastest_s(self) -> float:
        """Step time if memory were no concern: every unit in its fastest option."""
        return self.constant_s + sum(min(cost.time_s for cost in costs) for costs in self.costs)

    def least_memory_modes(self) -> tuple[ShardingMode, ...]:
        """The first option of every unit."""
        return tuple(options[0] for options in self.options)

    def step_time_s(self, modes: Sequence[ShardingMode]) -> float:
        """Predicted seconds of one optimizer step: equation 1's sum, and what it leaves out."""
        chosen = zip(self.options, self.costs, modes, strict=True)
        return self.constant_s + sum(costs[options.index(mode)].time_s for options, costs, mode in chosen)

    def peak(self, modes: Sequence[ShardingMode]) -> PeakMemory:
        """Predicted peak of one optimizer step."""
        return peak_memory(
            self.profile,
            self.units,
            modes,
            world_size=self.cluster.world_size,
            workload=self.workload,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=self.forward_prefetch,
        )


def assign_modes(setting: Setting, *, limit_bytes: int, search: str = "depth_first") -> Assignment | None:
    """The fastest assignment found whose peak fits, with a bound on all of them; None if none fits.

    Args:
        setting: model, units, cluster and workload.
        limit_bytes: the most bytes that may live on one rank.
        search: name of a solver in ``search.SOLVERS``.
    """
    least = setting.least_memory_modes()
    if setting.peak(least).peak_bytes > limit_bytes:
        return None
    solve = SOLVERS[search]
    relaxed, relaxed_modes = max(
        (_relaxation(setting, phase, limit_bytes, solve) for phase in _phases(setting)),
        key=lambda solved: solved[0].bound_s,
    )
    bound_s = setting.fastest_s + relaxed.bound_s
    proposals = [least, relaxed_modes]
    notes = [relaxed.note]
    if setting.peak(relaxed_modes).peak_bytes > limit_bytes:
        for solution, modes in _paper_proposals(setting, limit_bytes, solve):
            proposals.append(modes)
            notes.append(solution.note)
    fitting = [modes for modes in proposals if setting.peak(modes).peak_bytes <= limit_bytes]
    filled = [_fill(setting, modes, limit_bytes) for modes in fitting]
    best = min(filled, key=setting.step_time_s)
    step_time_s = setting.step_time_s(best)
    return Assignment(
        modes=best,
        step_time_s=step_time_s,
        peak=setting.peak(best),
        bound_s=min(bound_s, step_time_s),
        note=next(filter(None, notes), ""),
    )


def _relaxation(
    setting: Setting, phase: _Phase, limit_bytes: int, solve: Callable[[Problem], Solution]
) -> tuple[Solution, tuple[ShardingMode, ...]]:
    """Optimum, or a bound on it, of the problem that limits this phase alone."""
    knapsack = _Knapsack(setting, phase.option_bytes)
    least = sum(min(options) for options in phase.option_bytes)
    return knapsack.solve(solve, limit_bytes - phase.floor_bytes - least)


class _Knapsack:
    """Units as groups of equal ones: time and memory of each option beyond the unit's least."""

    def __init__(self, setting: Setting, memory_bytes: Sequence[Sequence[float]]) -> None:
        self.setting = setting
        members: dict[tuple[Choice, ...], list[int]] = {}
        for index, (costs, memory) in enumerate(zip(setting.costs, memory_bytes, strict=True)):
            least = min(memory)
            fastest_s = min(cost.time_s for cost in costs)
            choices = tuple(
                Choice(_round(cost.time_s - fastest_s), _round(num_bytes - least))
                for cost, num_bytes in zip(costs, memory, strict=True)
            )
            members.setdefault(choices, []).append(index)
        self.members = members
        self.most_bytes = sum(max(c.memory_bytes for c in choices) * len(units) for choices, units in members.items())

    def solve(
        self, solver: Callable[[Problem], Solution], budget_bytes: float
    ) -> tuple[Solution, tuple[ShardingMode, ...]]:
        """Solution and its modes; the budget is for bytes beyond every unit's least."""
        groups = tuple(Group(choices=choices, count=len(units)) for choices, units in self.members.items())
        solution = solver(Problem(groups=groups, budget_bytes=max(0.0, budget_bytes)))
        modes = list(self.setting.least_memory_modes())
        for units, counts in zip(self.members.values(), solution.counts, strict=True):
            # Later units get the mode with more memory: they are gathered last in forward and freed first in backward.
            taken = [option for option, count in enumerate(counts) for _ in range(count)]
            for unit, option in zip(units, taken, strict=True):
                modes[unit] = self.setting.options[unit][option]
        return solution, tuple(modes)


def _round(value: float) -> float:
    """Nine digits: units that differ by less than rounding are equal."""
    return float(f"{value:.9g}")


@dataclass(frozen=True, kw_only=True)
class _Phase:
    """Bytes alive at one moment: a floor, and what each unit's options add to it."""

    floor_bytes: float
    option_bytes: tuple[tuple[float, ...], ...]


def _phases(setting: Setting) -> tuple[_Phase, _Phase]:
    """The last operator's forward and the loss after it: moments when every DP unit is gathered.

    Both are phases of `cost.peak_memory`, whose peak is the largest of all: at most the limit there, at most it here.
    """
    profile, units, samples = setting.profile, setting.units, setting.workload.micro_batch_size
    last = len(profile.operators) - 1
    sharded = setting.cluster.world_size > 1
    states = sum(
        unit.parameter_bytes + unit.optimizer_bytes + (unit.parameter_bytes if unit.trainable_bytes else 0)
        for unit in units
    )
    constant = states / setting.cluster.world_size + profile.buffer_bytes + profile.batch_bytes_per_sample * samples
    in_operators = profile.activation_bytes_per_sample - profile.loss_activation_bytes_per_sample
    running = profile.operators[-1].forward_workspace_bytes_per_sample if profile.operators else 0.0
    in_loss = profile.loss_activation_bytes_per_sample + profile.loss_forward_workspace_bytes_per_sample

    def gathered(*, while_last_runs: bool) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(
                float(unit.gathered_bytes)
                if sharded and (mode.resident or (while_last_runs and unit.last >= last))
                else 0.0
                for mode in options
            )
            for unit, options in zip(units, setting.options, strict=True)
        )

    return (
        _Phase(floor_bytes=constant + (in_operators + running) * samples, option_bytes=gathered(while_last_runs=True)),
        _Phase(floor_bytes=constant + (in_operators + in_loss) * samples, option_bytes=gathered(while_last_runs=False)),
    )


def _paper_proposals(
    setting: Setting, limit_bytes: int, solve: Callable[[Problem], Solution]
) -> Iterator[tuple[Solution, tuple[ShardingMode, ...]]]:
    """Solutions of the paper's problem, the last of them at the largest budget whose peak fits (to bisection)."""
    memory = [[cost.memory_bytes for cost in costs] for costs in setting.costs]
    knapsack = _Knapsack(setting, memory)
    profile = setting.profile
    transient = largest_transient_bytes(
        profile, setting.units, world_size=setting.cluster.world_size, workload=setting.workload
    )
    constant = profile.buffer_bytes + profile.batch_bytes_per_sample * setting.workload.micro_batch_size
    first_budget = limit_bytes - transient - constant - sum(map(min, memory))
    yield knapsack.solve(solve, first_budget)
    low, high = 0.0, knapsack.most_bytes
    for _ in range(_BUDGET_STEPS):
        middle = (low + high) / 2
        _, modes = knapsack.solve(SOLVERS["greedy"], middle)
        if setting.peak(modes).peak_bytes <= limit_bytes:
            low = middle
        else:
            high = middle
    yield knapsack.solve(solve, low)
    yield knapsack.solve(SOLVERS["greedy"], low)


def _fill(setting: Setting, modes: tuple[ShardingMode, ...], limit_bytes: int) -> tuple[ShardingMode, ...]:
    """Moves units to faster modes, best time per byte first, while the closed form still fits."""
    upgrades = []
    for index, (options, costs) in enumerate(zip(setting.options, setting.costs, strict=True)):
        now = costs[options.index(modes[index])]
        for mode, cost in zip(options, costs, strict=True):
            saved_s, extra = now.time_s - cost.time_s, max(1.0, cost.memory_bytes - now.memory_bytes)
            if saved_s > 0:
                upgrades.append((_round(saved_s / extra), _round(saved_s), index, mode))
    refused: set[tuple[float, float]] = set()
    filled = list(modes)
    # Among equal units the last in forward order first: where that one does not fit, no earlier one does.
    for per_byte, saved_s, index, mode in sorted(upgrades, key=lambda upgrade: upgrade[:3], reverse=True):
        if (per_byte, saved_s) in refused:
            continue
        before, filled[index] = filled[index], mode
        if setting.peak(filled).peak_bytes > limit_bytes:
            filled[index] = before
            refused.add((per_byte, saved_s))
    return tuple(filled)
