"""One GPU under memory limits: OSDP's plans of minGPT beside what is written by hand, predictions beside measurements.

.. code-block:: bash

    python benchmarks/one_gpu.py                    # 1.3 and 6.6 billion parameters, about 20 minutes
    python benchmarks/one_gpu.py --sections [1.3B]
    python benchmarks/one_gpu.py --quick true       # a small model, also where there is no GPU

Each fit has a process of its own. Ways by hand are measured without a limit, and fit each limit that their peak is
below; OSDP is told the limit. Peaks are the most bytes that torch's allocator had given out. One GPU shows computing,
recomputing and moving to the host; no collective takes time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli
from rich.table import Table

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.gpu.one_fit import Fit
from benchmarks.measures.section import Row, Section, kept_in, measured
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds

GIB = 2**30
_ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 400


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of a model and its batch, the ways by hand, and the limits under which OSDP plans."""

    sizes: Mapping[str, int]
    by_hand: Sequence[str]
    limits: Sequence[float | None]
    """GiB; None: the device's memory."""
    num_steps: int = 24

    @property
    def fits(self) -> list[Fit]:
        """All ways by hand, and OSDP under all limits."""
        limits = [None if limit is None else int(limit * GIB) for limit in self.limits]
        ways = [("osdp", limit) for limit in limits] + [(way, None) for way in self.by_hand]
        return [Fit(**self.sizes, limit_bytes=limit, way=way, num_steps=self.num_steps) for way, limit in ways]


def _gpt(num_layers: int, hidden_size: int, micro_batch_size: int, length: int = 2048) -> dict[str, int]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "sequence_length": length,
        "vocabulary_size": 32000,
        "micro_batch_size": micro_batch_size,
    }


MODELS = {
    "1.3B": Model(
        sizes=_gpt(24, 2048, 8),
        by_hand=("plain", "checkpointing", "cpu_offload"),
        limits=(24, 16, None, 48, 28),
    ),
    "6.6B": Model(sizes=_gpt(32, 4096, 2), by_hand=("cpu_offload",), limits=(72,), num_steps=14),
}
"""Number of parameters -> model."""
QUICK = {
    "quick": Model(
        sizes=_gpt(3, 64, 2, length=32) | {"vocabulary_size": 64},
        by_hand=("plain", "checkpointing"),
        limits=(None, 0.003),
        num_steps=12,
    )
}


def measure(fit: Fit) -> dict[str, Any]:
    """Runs a fit in a new process."""
    command = [sys.executable, "-m", "benchmarks.measures.gpu.one_fit", json.dumps(asdict(fit))]
    try:
        ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end within {_TIMEOUT_S} s"}
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"fit"')]
    if not lines:
        return {"failed": f"exit code {ended.returncode}: {(ended.stderr or ended.stdout)[-800:]}"}
    found: dict[str, Any] = json.loads(lines[-1])
    del found["fit"]
    return found


def table(rows: Sequence[Row]) -> Table:
    """Steps and peaks, with OSDP's predictions, and the best way by hand whose peak is below the limit."""
    columns = ("way", "limit", "step", "predicted", "peak", "predicted", "best by hand", "ratio", "setup", "plan")
    made = Table(*columns, title="minGPT on one device")
    by_hand = [row for row in rows if row["case"]["way"] != "osdp" and "failed" not in row]
    for row in rows:
        way, limit = row["case"]["way"], row["case"]["limit_bytes"]
        name = "" if limit is None else format_bytes(limit)
        if "failed" in row:
            made.add_row(way, name, row["failed"][:100])
            continue
        step, peak = format_seconds(row["step_s"]), format_bytes(row["peak_bytes"]) if row["peak_bytes"] else ""
        setup = format_seconds(row["setup_s"])
        if way != "osdp":
            made.add_row(way, name, step, "", peak, "", "", "", setup)
            continue
        fitting = [each for each in by_hand if limit is None or (each["peak_bytes"] or 0) <= limit]
        best = min(fitting, key=lambda each: each["step_s"], default=None)
        made.add_row(
            way,
            name,
            step,
            format_seconds(row["predicted_s"]),
            peak,
            format_bytes(row["predicted_bytes"]),
            "none fits" if best is None else f"{best['case']['way']}, {format_seconds(best['step_s'])}",
            "" if best is None else f"{best['step_s'] / row['step_s']:.2f}",
            setup,
            _told(row["blocks"] | {f"states on the {place}": number for place, number in row["states"].items()}),
        )
    return made


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def main(
    output: Path | None = None,
    sections: list[str] = [],  # noqa: B006 -- a list shows its default
    *,
    quick: bool = False,
    fresh: bool = False,
) -> None:
    """Measures fits that the results lack, and prints a table for each model.

    Args:
        output: JSON file of results; None: the one of this repository, or none if quick.
        sections: Numbers of parameters, as `MODELS` has them; none: all.
        quick: A small model, to see that all of it runs.
        fresh: Measures everything anew.
    """
    models = QUICK if quick else {name: MODELS[name] for name in sections or MODELS}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with kept_in(output, "one_gpu", quick=quick) as results:
        for name, model in models.items():
            section = Section(name=f"{name}, {device}", cases=model.fits, measure=measure, table=table)
            measured(section, results, is_fresh=fresh)


if __name__ == "__main__":
    auto_cli(main)
