"""Answers of commands: as text of at most the terminal's width, 80 characters in a pipe, or as JSON."""

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
from lightning_osdp.planner.simulation import StepEstimate
from lightning_osdp.report.advice import Advice
from lightning_osdp.report.tables import plan_table, render


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of a command, as text and for JSON."""

    text: RenderableType
    document: Any
    """Argument of `json.dumps`."""
    fits: bool = True
    """False: no plan fits in memory, which the exit code tells."""


def write(answer: Answer, *, as_json: bool) -> None:
    """Writes an answer to standard output, which may be closed, or a pipe that nobody reads any more.

    Raises:
        ConfigurationError: standard output cannot be written to, as on a full disk.
    """
    out = sys.stdout
    if out is None:
        return
    text = json.dumps(answer.document, indent=2) + "\n" if as_json else render(answer.text, width=Console().width)
    try:
        out.write(_spelled(text, out.encoding or "ascii"))
        out.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # Python flushes at exit, which would fail again
        if not isinstance(error, BrokenPipeError):
            raise ConfigurationError(f"Expected standard output that can be written to: {error}.") from error


def _spelled(text: str, encoding: str) -> str:
    """Text in the letters of a locale, which may lack those of tables and names."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("\u2500", "-").encode(encoding, "backslashreplace").decode(encoding)
    return text


def plan_answer(plan: Plan, advice: Sequence[Advice]) -> Answer:
    """Answer with a plan's table, and with the plan's document and the advice."""
    document = {**json.loads(plan.to_json()), "advice": [asdict(each) for each in advice]}
    return Answer(text=plan_table(plan, advice), document=document)


def step_seconds(step: StepEstimate) -> dict[str, float]:
    """Seconds of a simulated step and of its parts, by the names of `StepEstimate`."""
    names = ("time_s", "compute_s", "communication_s", "exposed_communication_s", "overhead_s", "contention_s")
    return {name: getattr(step, name) for name in names}


def lines(*parts: RenderableType) -> Group:
    """Texts and tables one below the other; brackets in texts are no markup."""
    return Group(*(Text(part) if isinstance(part, str) else part for part in parts))
