"""What a command has found: as text of at most the terminal's width, 80 characters in a pipe, or as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.report.advice import Advice
from lightning_osdp.report.tables import plan_table, render
from lightning_osdp.simulation import StepEstimate


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of a command, in both forms."""

    text: RenderableType
    document: Any
    """What `json.dumps` takes."""
    fits: bool = True
    """Whether something fits; the exit code says so."""


def write(answer: Answer, *, as_json: bool) -> None:
    """Writes it to standard output, which somebody may have closed, or stopped to read.

    Raises:
        ConfigurationError: it cannot be written, as on a full disk.
    """
    out = sys.stdout
    if out is None:
        return
    text = json.dumps(answer.document, indent=2) + "\n" if as_json else render(answer.text, width=Console().width)
    try:
        out.write(_spelled(text, out.encoding or "ascii"))
        out.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # where what is left to flush goes
        if not isinstance(error, BrokenPipeError):
            raise ConfigurationError(f"Expected standard output that can be written to: {error}.") from error


def _spelled(text: str, encoding: str) -> str:
    """In the letters of a locale, of which lines of tables and names need not be."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("\u2500", "-").encode(encoding, "backslashreplace").decode(encoding)
    return text


def of_plan(plan: Plan, advice: Sequence[Advice]) -> Answer:
    """A plan's table; or the plan, with the advice beside its entries."""
    document = {**json.loads(plan.to_json()), "advice": [asdict(each) for each in advice]}
    return Answer(text=plan_table(plan, advice), document=document)


def step_seconds(step: StepEstimate) -> dict[str, float]:
    """Seconds of a simulated step by what they go to, `StepEstimate.time_s` among them."""
    names = ("time_s", "compute_s", "communication_s", "exposed_communication_s", "overhead_s", "contention_s")
    return {name: getattr(step, name) for name in names}


def lines(*parts: RenderableType) -> Group:
    """One below the other, with brackets in names left as they are."""
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))
