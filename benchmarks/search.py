"""Seconds and certified gap of plans, and of each solver on problems of 100 to 3000 operators, no two of them alike.

.. code-block:: bash

    python benchmarks/search.py

Every problem is solved under several budgets and seeds, several times each. The median of one problem counts, and the
median and the largest of a row's problems, and the largest gap. Seconds are of the processor: other work on the machine
counts little. Seeds are fixed: two runs differ in seconds only.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from jsonargparse import auto_cli
from rich.table import Table

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.search.block_plans import ADDITIVE, measure_block_plans
from benchmarks.measures.search.plans import Distance, PlanRow, measure_distance, measure_plans, plan_table
from benchmarks.measures.search.problems import paper_groups, random_groups, sliced_groups, with_budget
from benchmarks.measures.section import RESULTS, Target, machine, wide_console
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.planner.search import SOLVERS, Group, Problem, Solution

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


def measure(name: str, problems: Sequence[Problem], *, solver: str, num_runs: int) -> Row:
    """Returns one row of the table."""
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
    start_s = time.process_time()
    solve(problem)
    return time.process_time() - start_s


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


def targets(rows: Sequence[Row], plans: Sequence[PlanRow]) -> list[Target]:
    """Returns the project's targets with the worst number of the rows that each of them is about."""
    found: list[Target] = []
    greedy = [row for row in rows if row.solver == "greedy" and row.num_operators == 3000]
    if greedy:
        found += [
            Target(name="greedy, 3000 operators: s", limit=0.1, measured=max(row.slowest_s for row in greedy)),
            Target(name="greedy, 3000 operators: gap", limit=1e-3, measured=max(row.largest_gap for row in greedy)),
        ]
    paper = [row for row in rows if row.solver == "depth_first" and row.problem.startswith(PAPER)]
    found.append(Target(name="depth_first, 48 x 2: s", limit=1.0, measured=max(row.slowest_s for row in paper)))
    additive = [row for row in plans if not row.overlaps and row.problem == f"{ADDITIVE}, 48 blocks"]
    if additive:
        slowest_s = max(row.slowest_s for row in additive)
        found.append(Target(name="modes and activations of 48 blocks: s", limit=1.0, measured=slowest_s))
    for overlaps, limit in ((False, 5.0), (True, 10.0)):
        how = "overlap" if overlaps else "block"
        slowest = {row.problem: row.slowest_s for row in plans if row.overlaps == overlaps}
        if "plan, 96 blocks" in slowest:
            plan_s, sweep_s = (
                max(slowest["plan, 96 blocks"], slowest["plan, 96 blocks, any"]),
                slowest["sweep, 96 blocks"],
            )
            found.append(Target(name=f"plan of 96 blocks, {how}: s", limit=limit, measured=plan_s))
            found.append(Target(name=f"sweep of 96 blocks, {how}: s", limit=4 * limit, measured=sweep_s))
    equal = [row.largest_gap for row in plans if row.overlaps and "equal" in row.problem]
    return [*found, Target(name="equal units under overlap: gap", limit=0.05, measured=max(equal))]


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


def show(rows: Sequence[Row], plans: Sequence[PlanRow], distance: Distance, reached: Sequence[Target]) -> None:
    """Prints tables, and what the targets came to."""
    console = wide_console()
    console.print(table(rows))
    console.print(plan_table(plans))
    console.print(
        f"{distance.num_best} of {distance.num_problems} small models end with the best modes of all, the others within"
        f" {distance.largest_distance:.1%}; largest gap {distance.largest_gap:.1%}, bound violated by"
        f" {distance.num_violated}"
    )
    for target in reached:
        console.print(str(target))
    console.print(f"Machine: {machine()}")


def main(
    output: Path = RESULTS / "search.json",
    *,
    sizes: list[int] = [100, 400, 1000, 3000],  # noqa: B006 -- a list shows its default on the command line
    shares: list[float] = [0.1, 0.5, 0.9],  # noqa: B006
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    num_runs: int = 5,
    blocks: list[int] = [48, 96],  # noqa: B006
    num_small: int = 300,
) -> None:
    """Measures all solvers and whole plans, prints tables and writes JSON.

    Args:
        output: JSON file to write.
        sizes: Operators of a problem.
        shares: Budgets, from 0 (only the smallest choices fit) to 1 (everything fits).
        seeds: Of the random problems.
        num_runs: Times that each problem of a solver is solved; plans are made once.
        blocks: Transformers of which whole plans are made.
        num_small: Models of eight units for which all modes are tried.
    """
    rows = measure_all(sizes, shares=shares, seeds=seeds, num_runs=num_runs)
    plans = [*measure_plans(sizes, blocks, shares), *measure_block_plans(blocks, shares)]
    distance = measure_distance(num_small)
    reached = targets(rows, plans)
    show(rows, plans, distance, reached)
    result = {
        "date": datetime.now(tz=timezone.utc).date().isoformat(),
        "machine": machine(),
        "settings": {"sizes": sizes, "shares": shares, "seeds": seeds, "num_runs": num_runs, "blocks": blocks},
        "rows": [asdict(row) for row in rows],
        "plans": [asdict(row) for row in plans],
        "small": asdict(distance),
        "targets": [{**asdict(target), "is_met": target.is_met} for target in reached],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result) + "\n")
    print(f"Written to {output}")


if __name__ == "__main__":
    auto_cli(main)
