"""`depth_first`: the paper's search, made exact and finite. Branch and bound over groups of equal operators.

The paper (OSDP, Jiang et al. 2022, appendix B) decides one operator after the other, 2^n leaves for n operators. Here a
branch decides how many members of a group take each choice; `core.reduce_to_core` leaves out what the LP bound excludes
beforehand; and prefixes are cut by that bound (`core.Core.use_rates`) and by others that dominate them.

A node is a prefix of decisions; it also is an assignment, all later groups at their base. Its children differ from the
base next in any one of the later groups, and are searched best bound first. The problem is NP-hard: `NODE_BUDGET` ends
the search, with `greedy`'s assignment or a better one, and the least bound of all open nodes as a true bound.

Kellerer, Pferschy and Pisinger, "Knapsack Problems" (2004), chapters 11.3 to 11.5.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from lightning_osdp.planner.search.bound import relax
from lightning_osdp.planner.search.core import Core, Option, reduce_to_core
from lightning_osdp.planner.search.dominance import Skyline
from lightning_osdp.planner.search.greedy import assign_greedily
from lightning_osdp.planner.search.problem import Problem, Solution, certify

NODE_BUDGET = 300_000
"""Nodes after which `depth_first` gives up proving: 0.05 to 0.2 s in CPython 3.11, so that a sweep over fifty batch
sizes stays below ten seconds. Blocks of equal operators take hundreds to thousands of nodes; what runs into it are
hundreds of distinct operators with nearly the same seconds per byte, where the gap is then some 0.01% at most.
"""

EXACTNESS = 1e-12
"""Times that differ by less than this fraction of the sum of all operators' times are equal: sums are rounded."""

_Path: TypeAlias = "tuple[int, Option, _Path] | None"


class _Node(NamedTuple):
    """A prefix of decisions."""

    bound_s: float
    """Least time of everything below it, beyond the base's."""
    position: int
    """First group of the core that is open."""
    cost_s: float
    left_bytes: float
    path: _Path


def depth_first(problem: Problem, *, node_budget: int = NODE_BUDGET, first: list[list[int]] | None = None) -> Solution:
    """The best assignment, proven; past the node budget the best one found, with the bound that was reached.

    Args:
        problem: groups and budget.
        node_budget: most nodes to visit, one node's children more or less.
        first: members per group and choice of an assignment that fits; the better it is, the smaller the core. None:
            that of `greedy`.

    Raises:
        InfeasibleError: no assignment fits.
    """
    relaxation = relax(problem)
    first = first or assign_greedily(problem, relaxation)
    tolerance_s = EXACTNESS * sum(
        group.count * max(abs(choice.time_s) for choice in group.choices) for group in problem.groups if group.count
    )
    time_s = problem.time_s(first)
    excess_s = time_s - relaxation.bound_s
    if excess_s <= tolerance_s:
        return certify(problem, first, bound_s=time_s)
    core = reduce_to_core(problem, relaxation, excess_s=excess_s, tolerance_s=tolerance_s, max_nodes=node_budget)
    if core is None:
        return certify(problem, first, bound_s=relaxation.bound_s, num_nodes=node_budget, is_cut_short=True)
    search = _Search(problem, core, first, tolerance_s)
    search.run(node_budget)
    bound_s = problem.time_s(search.best)
    if search.stack:
        bound_s = max(relaxation.bound_s, core.base_s + min(node.bound_s for node in search.stack))
    return certify(problem, search.best, bound_s=bound_s, num_nodes=search.num_nodes, is_cut_short=bool(search.stack))


class _Search:
    """State of one search: the stack of open nodes, and the best assignment so far."""

    def __init__(self, problem: Problem, core: Core, first: list[list[int]], tolerance_s: float) -> None:
        self._problem, self._core, self._tolerance_s = problem, core, tolerance_s
        self.best = first
        self.num_nodes = core.num_nodes
        self._excess_s = problem.time_s(first) - core.base_s
        # left_bytes is a sum in another order than the one that decides; what is this close is left to that one
        self._rounding_bytes = 1e-12 * abs(problem.budget_bytes)
        self._prefixes = [Skyline(tolerance_s / 1000) for _ in range(len(core.groups) + 1)]
        self.stack = [_Node(0.0, 0, 0.0, core.left_bytes, None)]

    def run(self, node_budget: int) -> None:
        """Searches until the stack is empty or the nodes are used up."""
        while self.stack and self.num_nodes < node_budget:
            node = self.stack.pop()
            if node.bound_s >= self._excess_s - self._tolerance_s:
                continue
            self._consider(node)
            children = self._children(node)
            children.sort(reverse=True, key=lambda child: child.bound_s)
            self.stack += children
        cut_s = self._excess_s - self._tolerance_s
        self.stack = [node for node in self.stack if node.bound_s < cut_s]

    def _consider(self, node: _Node) -> None:
        """Takes the node's own assignment where it is the best so far."""
        excess_s = node.cost_s + self._core.price * max(0.0, node.left_bytes)
        if node.left_bytes < -self._rounding_bytes or excess_s >= self._excess_s - self._tolerance_s:
            return
        chosen, path = [], node.path
        while path is not None:
            position, option, path = path
            chosen.append((position, option))
        counts = self._core.counts(self._problem, chosen)
        if self._problem.memory_bytes(counts) > self._problem.budget_bytes:
            return
        excess_s = self._problem.time_s(counts) - self._core.base_s
        if excess_s < self._excess_s:
            self.best, self._excess_s = counts, excess_s

    def _children(self, node: _Node) -> list[_Node]:
        """Nodes that differ next from the base, in any later group, and whose bound is not too high."""
        core, rounding_bytes = self._core, self._rounding_bytes
        price, use_rates, return_rates = core.price, core.use_rates, core.return_rates
        cut_s = self._excess_s - self._tolerance_s
        _, first, node_cost_s, node_left_bytes, path = node
        children = []
        for position in range(first, len(core.groups)):
            self.num_nodes += 1
            rest_s = _rest_s(node_left_bytes, use_rates[position], return_rates[position], rounding_bytes)
            if node_cost_s + rest_s >= cut_s:
                break  # rates rise with the position: later groups are no better
            use_rate, return_rate = use_rates[position + 1], return_rates[position + 1]
            prefixes = self._prefixes[position + 1]
            for option in core.groups[position].options:
                cost_s = node_cost_s + option[0]
                if cost_s >= cut_s:
                    break
                self.num_nodes += 1
                left_bytes = node_left_bytes - option[1]
                bound_s = cost_s + _rest_s(left_bytes, use_rate, return_rate, rounding_bytes)
                if bound_s < cut_s and prefixes.add(-left_bytes, cost_s + price * left_bytes):
                    children.append(_Node(bound_s, position + 1, cost_s, left_bytes, (position, option, path)))
        return children


def _rest_s(left_bytes: float, use_rate: float, return_rate: float, rounding_bytes: float) -> float:
    """Least cost of what is left over or overdrawn."""
    if left_bytes >= 0:
        return left_bytes * use_rate
    return -left_bytes * return_rate if left_bytes < -rounding_bytes else 0.0
