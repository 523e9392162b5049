"""The search for modes: relaxations for the bound, repaired for the plan."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_osdp.assign.nested import Price, improve
from lightning_osdp.assign.relaxation import Solver, paper_knapsack, prefix_knapsack
from lightning_osdp.assign.repair import fill, repair
from lightning_osdp.assign.setting import Modes, Setting
from lightning_osdp.cost import PeakMemory
from lightning_osdp.search import SOLVERS, Solution
from lightning_osdp.search.bound import relax

MAX_RELAXATIONS = 4
"""Constraints that are relaxed to, one after the other: rarely does a fifth one make a plan or a better bound."""

_ROUNDING = 1e-12
"""Step times that differ by less than this fraction are equal."""

MAX_STATES = 100_000
"""States that `nested.improve` looks at: 0.3 s in CPython 3.11 where it needs them all."""

MIN_WIDTH = 100
"""States per unit below which it is not tried: with more than a thousand units. The gap is then some 0.001% anyway."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Modes aligned with the units, with what they are predicted to cost."""

    modes: Modes
    step_time_s: float
    peak: PeakMemory
    bound_s: float
    """No assignment that fits has a smaller step time."""
    note: str = ""

    @property
    def gap(self) -> float:
        """``step_time_s / bound_s - 1``."""
        return max(0.0, self.step_time_s / self.bound_s - 1) if self.bound_s > 0 else 0.0


def assign_modes(setting: Setting, *, limit_bytes: int, search: str = "depth_first") -> Assignment | None:
    """The fastest assignment found whose peak fits, with a bound on all of them; None if none fits.

    Args:
        setting: model, units, cluster and workload.
        limit_bytes: the most bytes that may live on one rank.
        search: name of a solver in ``search.SOLVERS``.
    """
    if setting.peak(setting.least_memory_modes).peak_bytes > limit_bytes:
        return None
    solve, rooms = SOLVERS[search], setting.memory.room_bytes(limit_bytes)
    relaxed = _relaxed(setting, rooms, solve)
    bound_s = max([setting.fastest_s, *(setting.fastest_s + each.solution.bound_s for each in relaxed)])
    proposals = [setting.fastest_modes, *(each.modes for each in relaxed)]
    if _violated(setting, proposals[-1], rooms) is not None:
        knapsack = paper_knapsack(setting, limit_bytes)
        proposals += [setting.least_memory_modes, knapsack.modes(SOLVERS["greedy"](knapsack.problem))]
    best = min((fill(setting, repair(setting, modes, rooms), rooms) for modes in proposals), key=setting.step_time_s)
    step_time_s = setting.step_time_s(best)
    thorough = search != "greedy" and len(setting.units) * MIN_WIDTH <= MAX_STATES
    if thorough and step_time_s > bound_s * (1 + _ROUNDING):
        prices = [each.price for each in relaxed]
        best, nested_s = improve(setting, best, rooms, prices=prices, max_states=MAX_STATES)
        step_time_s, bound_s = setting.step_time_s(best), max(bound_s, nested_s)
    proven = step_time_s <= bound_s * (1 + _ROUNDING)
    return Assignment(
        modes=best,
        step_time_s=step_time_s,
        peak=setting.peak(best),
        bound_s=step_time_s if proven else bound_s,
        note="" if proven else _note([each.solution for each in relaxed]),
    )


def _note(solutions: list[Solution]) -> str:
    """What a person should know of a search that was cut short; in words of its own, for its times are not a step's."""
    stopped = [solution for solution in solutions if solution.note]
    if not stopped:
        return ""
    nodes = max(solution.num_nodes for solution in stopped)
    return (
        f"{stopped[0].solver} stopped after {nodes:,} nodes: the best plan that was found, not proven to be the best."
    )


@dataclass(frozen=True, kw_only=True)
class _Relaxed:
    """What was found with one constraint."""

    solution: Solution
    modes: Modes
    price: Price


def _relaxed(setting: Setting, rooms: list[float], solve: Solver) -> list[_Relaxed]:
    """Solutions with one constraint each: with what the last one violates most, until nothing is violated."""
    relaxed: dict[int, _Relaxed] = {}
    modes = setting.fastest_modes
    while len(relaxed) < MAX_RELAXATIONS:
        k = _violated(setting, modes, rooms)
        if k is None or k in relaxed:
            break
        knapsack = prefix_knapsack(setting, k, rooms[k])
        solution = solve(knapsack.problem)
        modes = knapsack.modes(solution)
        relaxed[k] = _Relaxed(solution=solution, modes=modes, price=Price(k, relax(knapsack.problem).price))
    return list(relaxed.values())


def _violated(setting: Setting, modes: Modes, rooms: list[float]) -> int | None:
    """The k of the constraint that these modes exceed by most; None where they fit."""
    excess = [kept - room for kept, room in zip(setting.memory.kept_bytes(modes), rooms, strict=True)]
    k = max(range(len(excess)), key=excess.__getitem__)
    return k if excess[k] > 0 else None
