"""Pure numbers in, choices out: which treatment each operator gets, under one memory budget.

Every solver in `SOLVERS` takes a `Problem` and returns a `Solution` with a certified lower bound; `lp_bound` gives the
bound alone.
"""

from __future__ import annotations

from lightning_osdp.search.bound import lp_bound
from lightning_osdp.search.problem import Choice, Group, Problem, Solution
from lightning_osdp.search.solvers import SOLVERS

__all__ = ["SOLVERS", "Choice", "Group", "Problem", "Solution", "lp_bound"]
