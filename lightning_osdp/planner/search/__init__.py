"""Pure numbers in, choices out: which treatment each operator gets, under one memory budget.

A solver takes a `Problem` and returns a `Solution` with a certified lower bound. A new one is a file here and a line in
`SOLVERS`; the contract tests pick it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lightning_osdp.planner.search.depth_first import depth_first
from lightning_osdp.planner.search.exhaustive import exhaustive
from lightning_osdp.planner.search.greedy import greedy
from lightning_osdp.planner.search.problem import Choice, Group, Problem, Solution

__all__ = ["SOLVERS", "Choice", "Group", "Problem", "Solution"]

SOLVERS: Mapping[str, Callable[[Problem], Solution]] = MappingProxyType(
    {"depth_first": depth_first, "greedy": greedy, "exhaustive": exhaustive}
)
"""Solvers by the name that users give them; each raises `InfeasibleError` where no assignment fits."""
