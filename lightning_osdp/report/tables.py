"""Tables for a ``rich`` console; `render` turns them into plain text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds, three_digits
from lightning_osdp.report.advice import Advice
from lightning_osdp.report.sentences import (
    NOT_PREDICTED,
    explain,
    format_span,
    group_equal,
    is_predicted,
    name_treatment,
    name_units,
    summarise,
)

NEGLIGIBLE_SHARE = 0.01
"""Fraction of the measured peak below which other tensors are not worth a line."""
_NOT_IN_PLAN = "not in the plan"
_NOTHING: Mapping[str, str] = {}

Justify = Literal["left", "right"]
Columns = Mapping[str, Justify]

_UNIT_COLUMNS: Columns = {
    "operators": "left",
    "count": "right",
    "kind": "left",
    "mode": "left",
    "gathered\neach": "right",
    "time/step\neach": "right",
    "why": "left",
}
_APART_BELOW = {"kind": 100, "why": 150}
"""Characters of a line below which a column moves to a second table: squeezed, reasons take ten lines a row."""


def render(renderable: RenderableType, *, width: int = 120) -> str:
    """Plain text of what a ``rich`` console of so many characters would print: no colours, wherever it goes."""
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=False, color_system=None, force_jupyter=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def show(renderable: RenderableType) -> None:
    """Prints to the terminal, or to a file or pipe at the width of `render`."""
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(renderable)


def render_plan(plan: Plan, *, advice: Sequence[Advice] = (), width: int = 120) -> str:
    """The plan's table as text: its units, why each is as it is, and what the plan is predicted to cost.

    Args:
        plan: to show.
        advice: of `advise`, to stand below it.
        width: most characters of a line.
    """
    return render(plan_table(plan, advice), width=width)


def plan_table(plan: Plan, advice: Sequence[Advice] = ()) -> RenderableType:
    """Table of the plan's units, equal ones in one row, above what the plan is predicted to cost, and advice.

    Bytes, time and reason of a row are of *one* of its units. On a console too narrow for them the reasons follow
    in a table of their own.
    """
    return _PlanTable(plan, advice)


def comparison_table(
    plan: Plan,
    *,
    step_time_s: float | None = None,
    samples_per_s: float | None = None,
    peak_bytes: int | None = None,
    peak_steps: Sequence[int] = (),
    other_bytes: int = 0,
    why_not: str = "",
    more: Mapping[str, str] = _NOTHING,
) -> RenderableType:
    """Table of what the plan predicted beside what was measured, and their ratio.

    Numbers that are None were not measured, for ``why_not``. The peak is of the steps ``peak_steps``, and
    ``other_bytes`` are of tensors beside it that are in no plan; ``more`` has further measurements by title.
    Predictions stand there as a race has corrected them, too, if there was one that could.
    """
    lines: list[tuple[str, float, float | None, Callable[[float], str]]] = [
        ("step time", plan.step_time_s, step_time_s, format_seconds),
        ("samples/s", plan.samples_per_s, samples_per_s, three_digits),
        (f"peak memory{_steps(peak_steps)}", plan.peak_bytes, peak_bytes, format_bytes),
    ]
    not_measured = "not measured" + (f": {why_not}" if why_not else "")
    rows: list[tuple[str, ...]] = []
    for title, predicted, measured, form in lines:
        expected, found, ratio = NOT_PREDICTED, not_measured, "-"
        if is_predicted(plan):
            expected = form(predicted)
        if measured is not None:
            found = form(measured)
            if is_predicted(plan) and predicted > 0:
                ratio = f"{measured / predicted:.2f}"
        rows.append((title, expected, found, ratio))
    if other_bytes > NEGLIGIBLE_SHARE * (peak_bytes or 0):
        rows.append(("other tensors of yours", _NOT_IN_PLAN, format_bytes(other_bytes), "-"))
    rows += [(title, _NOT_IN_PLAN, text, "-") for title, text in more.items()]
    columns: Columns = {"": "left", "predicted": "right", "measured": "right", "measured / predicted": "right"}
    if plan.corrected_step_time_s:
        samples_per_s = plan.samples_per_s * plan.step_time_s / plan.corrected_step_time_s
        columns = {"": "left", "predicted": "right", "corrected": "right", **columns}
        corrected = {
            "step time": format_seconds(plan.corrected_step_time_s),
            "samples/s": three_digits(samples_per_s),
        }
        rows = [(title, expected, corrected.get(title, "-"), *rest) for title, expected, *rest in rows]
    return table(columns, rows, title="OSDP: predicted and measured")


def _steps(numbers: Sequence[int]) -> str:
    """Text of the steps that a peak is of: ``(steps 3 to 5, 17)``."""
    if not numbers:
        return ""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return f" (steps {', '.join(str(a) if a == b else f'{a} to {b}' for a, b in runs)})"


@dataclass(frozen=True)
class _PlanTable:
    plan: Plan
    advice: Sequence[Advice]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        headings, rows = list(_UNIT_COLUMNS), _unit_rows(self.plan)
        apart = [name for name, least_width in _APART_BELOW.items() if options.max_width < least_width]
        name_width = options.max_width * 2 // 5
        rows = [(_in_lines(names, name_width), *rest) for names, *rest in rows]
        tables = [[name for name in headings if name not in apart], *([["operators", *apart]] if apart else [])]
        for i, chosen in enumerate(tables):
            yield table(
                {name: _UNIT_COLUMNS[name] for name in chosen},
                [tuple(row[headings.index(name)] for name in chosen) for row in rows],
                title=None if i else "OSDP plan",
                name_width=name_width,
            )
            yield ""
        grid = Table.grid(padding=(0, 2))
        for label, sentence in (*summarise(self.plan), *(("advice", each.sentence) for each in self.advice)):
            grid.add_row(Text(label), Text(sentence))
        yield grid


def _unit_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            name_units(units, plan),
            f"x{len(units)}" if len(units) > 1 else "1",
            units[0].kind or "-",
            name_treatment(units[0]),
            format_bytes(units[0].parameter_bytes),
            format_span([unit.time_s for unit in units], format_seconds) if is_predicted(plan) else NOT_PREDICTED,
            explain(units, plan),
        )
        for units in group_equal(plan.units)
    ]


def _in_lines(names: str, width: int) -> str:
    """Names in lines of this width, as far as they can be broken after their dots and commas."""
    lines = []
    for name in names.split("\n"):
        lines.append("")
        for part in re.split(r"(?<=[.,])", name):
            if lines[-1] and len(lines[-1] + part) > width:
                lines.append("")
            lines[-1] += part
    return "\n".join(lines)


def table(columns: Columns, rows: Sequence[tuple[str, ...]], *, title: str | None = None, name_width: int = 0) -> Table:
    """Table of plain cells; the first column is left whole where no line of it exceeds ``name_width``."""
    # padding on the right only, and no frame: names and reasons need the width
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    whole = max((len(line) for row in rows for line in row[0].splitlines()), default=0) <= name_width
    for i, (heading, justify) in enumerate(columns.items()):
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=whole and i == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: brackets in a name are no markup
    return table
