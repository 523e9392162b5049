"""Modes for seconds that add up: relaxations for the bound, repaired for the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_osdp.assign.additive import Additive, Modes
from lightning_osdp.assign.nested import Price, improve
from lightning_osdp.assign.relaxation import Solver, prefix_knapsack
from lightning_osdp.assign.repair import fill, repair
from lightning_osdp.search import SOLVERS, Solution
from lightning_osdp.search.bound import relax

MAX_RELAXATIONS = 4
"""Constraints that are relaxed to, one after the other: rarely does a fifth one make a plan or a better bound."""

ROUNDING = 1e-12
"""Step times that differ by less than this fraction are equal."""

MAX_STATES = 100_000
"""States that `nested.improve` looks at where units have two options: 0.3 s in CPython 3.11 if it needs them all."""

MIN_WIDTH = 100
"""States per unit below which it is not tried: with more than a thousand units. The gap is then some 0.001% anyway."""


@dataclass(frozen=True, kw_only=True)
class Solved:
    """Modes that fit."""

    modes: Modes
    time_s: float
    bound_s: float
    """No modes that fit are faster; the time itself where it is proven."""
    note: str = ""


def solve(problem: Additive, rooms: Sequence[float], *, search: str, tolerance: float = ROUNDING) -> Solved:
    """The fastest modes found, with a bound on all of them.

    Args:
        problem: seconds of every option.
        rooms: of `StepMemory.room_bytes`; every unit's smallest option must fit.
        search: name of a solver in ``search.SOLVERS``.
        tolerance: a gap that is as good as none.
    """
    relaxed = _relaxed(problem, rooms, SOLVERS[search])
    bound_s = max([problem.fastest_s, *(problem.fastest_s + each.solution.bound_s for each in relaxed)])
    proposals = [problem.fastest_modes, *(each.modes for each in relaxed)]
    if _violated(problem, proposals[-1], rooms) is not None:
        proposals.append(problem.least_memory_modes)
    best = min((fill(problem, repair(problem, modes, rooms), rooms) for modes in proposals), key=problem.time_s)
    time_s = problem.time_s(best)
    thorough = search != "greedy" and len(problem.options) * MIN_WIDTH <= MAX_STATES
    if thorough and time_s > bound_s * (1 + tolerance):
        prices = [each.price for each in relaxed]
        num_states = MAX_STATES * 4 // max(2, *map(len, problem.options)) ** 2
        best, nested_s = improve(problem, best, rooms, prices=prices, max_states=num_states)
        time_s, bound_s = problem.time_s(best), max(bound_s, nested_s)
    proven = time_s <= bound_s * (1 + ROUNDING)
    return Solved(
        modes=best,
        time_s=time_s,
        bound_s=time_s if proven else bound_s,
        note="" if proven else _note([each.solution for each in relaxed]),
    )


def _note(solutions: list[Solution]) -> str:
    """What a person should know of a search that was cut short; in words of its own, for its times are not a step's."""
    stopped = [solution for solution in solutions if solution.is_cut_short]
    if not stopped:
        return ""
    nodes = max(solution.num_nodes for solution in stopped)
    return f"depth_first stopped after {nodes:,} nodes: the best plan that was found, not proven to be the best."


@dataclass(frozen=True, kw_only=True)
class _Relaxed:
    """What was found with one constraint."""

    solution: Solution
    modes: Modes
    price: Price


def _relaxed(problem: Additive, rooms: Sequence[float], solver: Solver) -> list[_Relaxed]:
    """Solutions with one constraint each: with what the last one violates most, until nothing is violated."""
    relaxed: dict[int, _Relaxed] = {}
    modes = problem.fastest_modes
    while len(relaxed) < MAX_RELAXATIONS:
        k = _violated(problem, modes, rooms)
        if k is None or k in relaxed:
            break
        knapsack = prefix_knapsack(problem, k, rooms[k])
        solution = solver(knapsack.problem)
        modes = knapsack.modes(solution)
        relaxed[k] = _Relaxed(solution=solution, modes=modes, price=Price(k, relax(knapsack.problem).price))
    return list(relaxed.values())


def _violated(problem: Additive, modes: Modes, rooms: Sequence[float]) -> int | None:
    """The k of the constraint that these modes exceed by most; None where they fit."""
    excess = [kept - room for kept, room in zip(problem.memory.kept_bytes(modes), rooms, strict=True)]
    k = max(range(len(excess)), key=excess.__getitem__)
    return k if excess[k] > 0 else None
