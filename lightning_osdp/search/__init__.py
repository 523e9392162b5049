"""Pure numbers in, choices out: which treatment each operator gets, under one memory budget.

Every solver takes a `Problem` and returns a `Solution` with a certified lower bound; a new one is a file here and a
line in `SOLVERS`, and the contract tests pick it up. `lp_bound` gives the bound alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lightning_osdp.search.bound import lp_bound
from lightning_osdp.search.depth_first import depth_first
from lightning_osdp.search.exhaustive import exhaustive
from lightning_osdp.search.greedy import greedy
from lightning_osdp.search.problem import Choice, Group, Problem, Solution

__all__ = ["SOLVERS", "Choice", "Group", "Problem", "Solution", "lp_bound"]

SOLVERS: Mapping[str, Callable[[Problem], Solution]] = MappingProxyType(
    {"depth_first": depth_first, "greedy": greedy, "exhaustive": exhaustive}
)
"""Solvers by the name that users give them; each raises `InfeasibleError` where no assignment fits."""
