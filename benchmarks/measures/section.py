"""Parts of a benchmark whose cases are measured one by one and kept in one JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parents[1] / "results"
PICTURES = Path(__file__).resolve().parents[2] / "docs" / "_static"
Row: TypeAlias = dict[str, Any]
"""Values that were found of one case, as JSON can write them; the case itself is under ``"case"``."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Limit that a measured number must stay below, or reach."""

    name: str
    limit: float
    measured: float
    is_least: bool = False
    """True where the limit is to be reached instead."""

    @property
    def is_met(self) -> bool:
        """True if the measured number is below its limit, or reaches it."""
        return self.measured >= self.limit if self.is_least else self.measured < self.limit

    def __str__(self) -> str:
        outcome = "met" if self.is_met else "MISSED"
        bound = "at least" if self.is_least else "below"
        return f"{self.name}: {self.measured:.3g}, target {bound} {self.limit:g}: {outcome}"


@dataclass(frozen=True, kw_only=True)
class Section:
    """One question, asked of many cases."""

    name: str
    cases: Sequence[Any]
    """Dataclasses of numbers and names."""
    measure: Callable[[Any], dict[str, Any]]
    table: Callable[[Sequence[Row]], Table]
    targets: Callable[[Sequence[Row]], list[Target]] = lambda _: []
    misses: Callable[[Sequence[Row]], list[str]] = lambda _: []
    """Line for each row that misses a target."""


class Results:
    """A JSON file of sections. Each row is written as soon as it is there: a run that was killed goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sections: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def forget(self, name: str) -> None:
        """Drops the rows of a section, so that they are measured anew."""
        self._sections.pop(name, None)

    def stored(self, name: str) -> list[Row]:
        """Rows of a section that the file has; none where it was not measured."""
        rows: list[Row] = self._sections.get(name, {}).get("rows", [])
        return rows

    def rows(self, section: Section, progress: Callable[[str], None]) -> list[Row]:
        """Rows of all cases of a section, in their order; measures those that the file does not have."""
        known = self.stored(section.name)
        rows: list[Row] = []
        for index, case in enumerate(section.cases):
            fields = _rounded(json.loads(json.dumps(asdict(case))))  # as a file has them
            found = next((row for row in known if _given(row["case"]) == _given(fields)), None)
            if found is None:
                progress(f"{section.name} {index + 1} of {len(section.cases)}: {case}")
                new: Row = _rounded({"case": fields, **section.measure(case)})
                found = new
                known = [*known, found]
                self._write(section.name, known)
            rows.append(found)
        if rows != known:  # others are of cases that are no longer asked for
            self._write(section.name, rows)
        return rows

    def _write(self, name: str, rows: Sequence[Row]) -> None:
        date = datetime.now(tz=timezone.utc).date().isoformat()
        self._sections[name] = {"date": date, "machine": machine(), "rows": list(rows)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(_as_text(self._sections))
        unfinished.replace(self._path)


@contextmanager
def kept_in(output: Path | None, name: str, *, quick: bool) -> Iterator[Results]:
    """Results in the file that is given, else that of this name: in `RESULTS`, or nowhere afterwards if quick."""
    with TemporaryDirectory() as folder:
        yield Results(output or (Path(folder) if quick else RESULTS) / f"{name}.json")


def measured(section: Section, results: Results, *, is_fresh: bool) -> None:
    """Measures the cases of a section, all of them anew if asked to, and prints its table, misses and targets."""
    console = wide_console()
    if is_fresh:
        results.forget(section.name)
    rows = results.rows(section, lambda line: console.print(line, style="dim", soft_wrap=True))
    console.print(section.table(rows))
    for line in (*section.misses(rows), *section.targets(rows)):
        console.print(str(line), soft_wrap=True)


def wide_console() -> Console:
    """The terminal, or a file or pipe with room for wide tables."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def _given(case: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a case that are neither None nor false: a file may be older than such a field."""
    given = {name: value for name, value in case.items() if value is not None and value is not False}
    return {name: _given(value) if isinstance(value, Mapping) else value for name, value in given.items()}


def _as_text(sections: dict[str, Any]) -> str:
    """JSON with one line per row."""
    texts = []
    for name, section in sections.items():
        rows = ",\n".join(f"{json.dumps(row, separators=(',', ':'))}" for row in section["rows"])
        head = f'{json.dumps(name)}: {{\n"date": {json.dumps(section["date"])},\n'
        texts.append(f'{head}"machine": {json.dumps(section["machine"])},\n"rows": [\n{rows}\n]\n}}')
    return "{\n" + ",\n".join(texts) + "\n}\n"


def _rounded(value: Any) -> Any:
    """Five digits of each float, which is more than measurements have; whole floats become whole numbers."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return int(value) if value.is_integer() else float(f"{value:.5g}")


def machine() -> str:
    """Returns processor, cores and interpreter; never a host's name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():  # Linux; elsewhere the platform knows
        names = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
        model = next(names, model)
    return f"{model}, {os.cpu_count()} cores, {platform.python_implementation()} {platform.python_version()}"
