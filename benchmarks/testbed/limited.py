"""The process that `benchmarks.testbed.limit` starts: ``python -m benchmarks.testbed.limited FOLDER``."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.families import build
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.step import Step
from lightning_osdp.callbacks.peak import living_tensors
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.profiler import LiveBytes

_WARM_UP_STEPS = 2
_NO_MEMORY = ("not enough memory", "can't allocate memory", "Cannot allocate memory")
"""What torch says, and what the C library does."""


def main(folder: Path) -> None:
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
            for _ in range(arguments["num_steps"]):
                step()
            outcome = {"lived": True, "reason": ""}
        except (RuntimeError, MemoryError) as error:
            limit_data(resource.RLIM_INFINITY)
            if not isinstance(error, MemoryError) and not any(text in str(error) for text in _NO_MEMORY):
                raise
            outcome = {"lived": False, "reason": str(error).strip().splitlines()[-1] if str(error) else "MemoryError"}
    (folder / "outcome.json").write_text(json.dumps(outcome))


def beside_tensors_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this process's data segment beside some tensors: the interpreter, libraries, caches.

    Args:
        tensors: all that training has alive.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    living = LiveBytes("cpu")
    living.track(tensors)
    return data_segment_bytes() - living.current_bytes


def data_segment_bytes() -> int:
    """What ``RLIMIT_DATA`` is compared with: private, writable memory, touched or not."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))


def limit_data(num_bytes: int) -> None:
    """No operation of this process can take more of its data segment from now on."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
