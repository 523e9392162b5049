"""Seconds and certified gap of each solver, on problems of 100 to 3000 operators of which no two are alike.

.. code-block:: bash

    python benchmarks/search.py

Every problem is solved under several budgets and seeds, several times each. Of one problem the median counts, of a
row the median and the largest of its problems, and the largest gap. Seeds are fixed: two runs differ in seconds only.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from jsonargparse import auto_cli
from rich.console import Console
from rich.table import Table

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.problems import paper_groups, random_groups, sliced_groups, with_budget
from lightning_osdp.core.duration import format_seconds
from lightning_osdp.search import SOLVERS, Group, Problem, Solution

RESULT = Path(__file__).parent / "results" / "search.json"
MEASURED_SOLVERS = ("greedy", "depth_first")
PAPER = "48 blocks x 2"
"""Name of the rows on the paper's model."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One solver on all problems of one kind and size."""

    problem: str
    num_operators: int
    num_choices: str
    solver: str
    median_s: float
    slowest_s: float
    largest_gap: float
    num_proven: int
    num_problems: int


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a measured number must stay below."""

    name: str
    limit: float
    measured: float

    @property
    def is_met(self) -> bool:
        """Whether the measured number is below its limit."""
        return self.measured < self.limit


def measure(name: str, problems: Sequence[Problem], *, solver: str, num_runs: int) -> Row:
    """Returns one row of the table.

    Args:
        name: of this kind of problem.
        problems: alike in everything but numbers.
        solver: name in ``search.SOLVERS``.
        num_runs: times that each problem is solved; their median counts.
    """
    seconds = [statistics.median(_seconds(SOLVERS[solver], problem) for _ in range(num_runs)) for problem in problems]
    gaps = [SOLVERS[solver](problem).gap for problem in problems]
    menu_sizes = {len(group.choices) for problem in problems for group in problem.groups}
    return Row(
        problem=name,
        num_operators=problems[0].num_operators,
        num_choices="-".join(str(size) for size in sorted({min(menu_sizes), max(menu_sizes)})),
        solver=solver,
        median_s=statistics.median(seconds),
        slowest_s=max(seconds),
        largest_gap=max(gaps),
        num_proven=gaps.count(0.0),
        num_problems=len(problems),
    )


def _seconds(solve: Callable[[Problem], Solution], problem: Problem) -> float:
    start_s = time.perf_counter()
    solve(problem)
    return time.perf_counter() - start_s


def measure_all(sizes: Sequence[int], *, shares: Sequence[float], seeds: Sequence[int], num_runs: int) -> list[Row]:
    """Returns all rows: different operators of both kinds at all sizes, and the paper's blocks."""
    kinds: dict[str, Callable[[int, int], tuple[Group, ...]]] = {"random": random_groups, "equation 2": sliced_groups}
    cases: list[tuple[str, list[tuple[Group, ...]]]] = [
        (name, [build(size, seed) for seed in seeds]) for name, build in kinds.items() for size in sizes
    ]
    cases += [
        (PAPER, [paper_groups(1)]),
        (f"{PAPER}, 4 slices", [paper_groups(4)]),
        (f"{PAPER}, not merged", [paper_groups(1, merged=False)]),
        (f"{PAPER}, 4 slices, not merged", [paper_groups(4, merged=False)]),
    ]
    return [
        measure(
            name, [with_budget(groups, share) for groups in drawn for share in shares], solver=solver, num_runs=num_runs
        )
        for name, drawn in cases
        for solver in MEASURED_SOLVERS
    ]


def targets(rows: Sequence[Row]) -> list[Target]:
    """Returns the project's targets with the worst number of the rows that each of them is about."""
    found: list[Target] = []
    greedy = [row for row in rows if row.solver == "greedy" and row.num_operators == 3000]
    if greedy:
        found += [
            Target(name="greedy, 3000 operators: s", limit=0.1, measured=max(row.slowest_s for row in greedy)),
            Target(name="greedy, 3000 operators: gap", limit=1e-3, measured=max(row.largest_gap for row in greedy)),
        ]
    paper = [row for row in rows if row.solver == "depth_first" and row.problem.startswith(PAPER)]
    return [*found, Target(name="depth_first, 48 x 2: s", limit=1.0, measured=max(row.slowest_s for row in paper))]


def table(rows: Sequence[Row]) -> Table:
    """Returns the rows as people read them."""
    drawn = Table("problem", "solver", caption="proven: problems solved with a gap of zero")
    for column in ("operators", "choices", "median", "slowest", "largest gap", "proven"):
        drawn.add_column(column, justify="right")
    for row in rows:
        drawn.add_row(
            row.problem,
            row.solver,
            f"{row.num_operators:,}",
            row.num_choices,
            format_seconds(row.median_s),
            format_seconds(row.slowest_s),
            f"{row.largest_gap:.5%}",
            f"{row.num_proven} of {row.num_problems}",
        )
    return drawn


def machine() -> str:
    """Returns processor, cores and interpreter; never a host's name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():  # Linux; elsewhere the platform knows
        names = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
        model = next(names, model)
    return f"{model}, {os.cpu_count()} cores, {platform.python_implementation()} {platform.python_version()}"


def main(
    output: Path = RESULT,
    sizes: list[int] = [100, 400, 1000, 3000],  # noqa: B006 -- a list shows its default on the command line
    shares: list[float] = [0.1, 0.5, 0.9],  # noqa: B006
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    num_runs: int = 5,
) -> None:
    """Measures all solvers, prints a table and writes JSON.

    Args:
        output: JSON file to write.
        sizes: Operators of a problem.
        shares: Budgets, from 0 (only the smallest choices fit) to 1 (everything fits).
        seeds: Of the random problems.
        num_runs: Times that each problem is solved.
    """
    rows = measure_all(sizes, shares=shares, seeds=seeds, num_runs=num_runs)
    reached = targets(rows)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table(rows))
    for target in reached:
        outcome = "met" if target.is_met else "MISSED"
        console.print(f"{target.name}: {target.measured:.3g}, target below {target.limit:g}: {outcome}")
    console.print(f"Machine: {machine()}")
    result = {
        "date": datetime.now(tz=timezone.utc).date().isoformat(),
        "machine": machine(),
        "settings": {"sizes": sizes, "shares": shares, "seeds": seeds, "num_runs": num_runs},
        "rows": [asdict(row) for row in rows],
        "targets": [{**asdict(target), "is_met": target.is_met} for target in reached],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"Written to {output}")


if __name__ == "__main__":
    auto_cli(main)
