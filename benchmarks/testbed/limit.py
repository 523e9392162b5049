"""Does a plan's training live under a memory limit? Decided by the kernel: a limit on the process's data segment.

Linux only. The limit is what tensors may take: what the process has beside them when training has begun is added.
Training runs in a process of its own: ``python -m benchmarks.testbed.limit FOLDER``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.families import build
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.step import Step
from lightning_osdp.callbacks.peak import living_tensors
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.profiler import LiveBytes

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
"""Settings with which glibc asks the kernel for every tensor of 16 KiB, and gives it back at once. Smaller ones share
pages, of which some stay: at 64 KiB a model of many small tensors took 8% more than its tensors, at 16 KiB no family
took over 3%."""
_ROOT = Path(__file__).resolve().parents[2]
_WARM_UP_STEPS, _LIMITED_STEPS = 2, 3
_TIMEOUT_S = 300.0
_NO_MEMORY = ("not enough memory", "can't allocate memory", "Cannot allocate memory")
"""Texts of torch and of the C library where memory lacks."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of training under a limit."""

    lived: bool
    reason: str
    """Last line of a process that died; empty where the process lived."""


def lives_under(
    limit_bytes: int,
    family: str,
    plan: Plan,
    *,
    optimizer: str = "adamw",
    precision: str = "32-true",
) -> Outcome:
    """Trains as rank 0 of the plan's ranks in a process of its own, under a hard limit once two steps are taken.

    Args:
        limit_bytes: that tensors may take.
        family: name of `benchmarks.families`.
        plan: that was made for it.
        optimizer: name of `benchmarks.families.OPTIMIZERS`.
        precision: the Trainer's argument of this name.

    Raises:
        RuntimeError: the process failed of something else than memory.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan.save(folder / "plan.json")
        arguments = {"limit_bytes": limit_bytes, "family": family, "optimizer": optimizer, "precision": precision}
        (folder / "arguments.json").write_text(json.dumps(arguments))
        environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "benchmarks.testbed.limit", str(folder)]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
        outcome = folder / "outcome.json"
        if outcome.exists():
            return Outcome(**json.loads(outcome.read_text()))
        last = (done.stderr.strip().splitlines() or [""])[-1]
        # C++ that cannot report a failed allocation ends the process
        if done.returncode == -signal.SIGABRT and "bad_alloc" in done.stderr:
            return Outcome(lived=False, reason=last)
        raise RuntimeError(f"Expected training to live or to run out of memory, but it ended with: {last or done}")


def _train_limited(folder: Path) -> None:
    """Trains, first without and then with the limit, and writes ``outcome.json``."""
    arguments = json.loads((folder / "arguments.json").read_text())
    plan = Plan.load(folder / "plan.json")
    torch.set_num_threads(1)
    with fake_group(plan.world_size):
        module = build(arguments["family"], optimizer=arguments["optimizer"])
        step = Step(module, plan, precision=arguments["precision"])
        for _ in range(_WARM_UP_STEPS):
            step()
        try:
            beside_bytes = beside_tensors_bytes([*living_tensors(step.sharded.module, [step.optimizer]), *step.batch])
            limit_data(beside_bytes + arguments["limit_bytes"])
            for _ in range(_LIMITED_STEPS):
                step()
            outcome = {"lived": True, "reason": ""}
        except (RuntimeError, MemoryError) as error:
            limit_data(resource.RLIM_INFINITY)
            if not isinstance(error, MemoryError) and not any(text in str(error) for text in _NO_MEMORY):
                raise
            outcome = {"lived": False, "reason": str(error).strip().splitlines()[-1] if str(error) else "MemoryError"}
    (folder / "outcome.json").write_text(json.dumps(outcome))


def beside_tensors_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this process's data segment beside some tensors: the interpreter, libraries, caches."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    living = LiveBytes("cpu")
    living.track(tensors)
    return data_segment_bytes() - living.current_bytes


def data_segment_bytes() -> int:
    """Bytes that ``RLIMIT_DATA`` is compared with: private, writable memory, touched or not."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))


def limit_data(num_bytes: int) -> None:
    """Keeps operations of this process from taking more of its data segment from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))


if __name__ == "__main__":
    _train_limited(Path(sys.argv[1]))
