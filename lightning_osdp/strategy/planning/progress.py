"""Progress while a fit is planned: one changing line on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_utilities.core.rank_zero import rank_zero_info
from rich.console import Console
from rich.live import Live
from rich.text import Text

from lightning_osdp.core.text.progress import Progress, silent

LINES_APART_S = 10.0
"""Where lines stay, a stage has one when it begins, and another no sooner than this after the last."""


@contextmanager
def shown_progress(*, is_global_zero: bool) -> Iterator[Progress]:
    """Something to tell progress to, which rank 0 shows.

    The line on a terminal is drawn when it changes and by no thread, which would take time from what is measured.
    """
    console = Console()
    if not is_global_zero:
        yield silent
    elif console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda stage, detail: live.update(Text(_sentence(stage, detail), no_wrap=True), refresh=True)
    else:
        yield _lines()


def _lines() -> Progress:
    last_stage, last_s = "", 0.0

    def show(stage: str, detail: str) -> None:
        nonlocal last_stage, last_s
        if stage == last_stage and time.perf_counter() - last_s < LINES_APART_S:
            return
        rank_zero_info(_sentence(stage, detail))
        last_stage, last_s = stage, time.perf_counter()

    return show


def _sentence(stage: str, detail: str) -> str:
    return f"OSDP: {stage}" + (f", {detail}" if detail else "")
