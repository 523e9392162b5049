"""Does a plan's training live under a memory limit? Decided by the kernel: a limit on the process's data segment.

Linux only. The limit is what tensors may take: what the process has beside them when training has begun is added.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lightning_osdp.core.plans.plan import Plan

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
"""glibc then asks the kernel for every tensor of 16 KiB, and gives it back at once. Smaller ones share pages, of which
some stay: at 64 KiB a model of many small tensors took 8% more than its tensors, at 16 KiB no family took over 3%."""
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What became of training under a limit."""

    lived: bool
    reason: str
    """The last that a process had to say which died; empty where it lived."""


def lives_under(
    limit_bytes: int,
    family: str,
    plan: Plan,
    *,
    optimizer: str = "adamw",
    precision: str = "32-true",
    num_steps: int = 3,
    timeout_s: float = 300.0,
) -> Outcome:
    """Trains as rank 0 of the plan's ranks in a process of its own, under a hard limit once two steps are taken.

    Args:
        limit_bytes: that tensors may take.
        family: name of `benchmarks.families`.
        plan: that was made for it.
        optimizer: name of `benchmarks.families.OPTIMIZERS`.
        precision: the Trainer's argument of this name.
        num_steps: optimizer steps under the limit.
        timeout_s: longest that all of it may take.

    Raises:
        RuntimeError: the process failed of something else than memory.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.save(folder / "plan.json")
        arguments = {"limit_bytes": limit_bytes, "family": family, "optimizer": optimizer}
        arguments |= {"precision": precision, "num_steps": num_steps}
        (folder / "arguments.json").write_text(json.dumps(arguments))
        environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks.testbed.limited", str(folder)]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=timeout_s)
        outcome = folder / "outcome.json"
        if outcome.exists():
            return Outcome(**json.loads(outcome.read_text()))
        last = (done.stderr.strip().splitlines() or [""])[-1]
        # C++ that cannot report a failed allocation ends the process
        if done.returncode == -signal.SIGABRT and "bad_alloc" in done.stderr:
            return Outcome(lived=False, reason=last)
        raise RuntimeError(f"Expected training to live or to run out of memory, but it ended with: {last or done}")
