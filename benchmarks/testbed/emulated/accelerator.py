"""An accelerator of fake tensors: torch's ``privateuse1``, which has a thread of its own in autograd, as CUDA has.

.. code-block:: bash

    python -m benchmarks.testbed.emulated.accelerator mingpt convolutional

A process has it for good once it is registered, so what is traced on it is traced in a process of its own. Every line
that this writes is JSON: how much of a family's trace differs from that on fake tensors on CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from benchmarks.families import build
from lightning_osdp.profiler.step.fake_model import without_values
from lightning_osdp.profiler.step.run_step import StepRunner
from lightning_osdp.profiler.tracing.trace import trace_step

NAME = "emulated"
CHOICES = ("recompute", "offload")
_NUM_SAMPLES = 4
_ROOT = Path(__file__).resolve().parents[3]


class _Module(_DummyBackendModule):
    """Device module with what checkpointing asks of it, too."""

    _initialized = True

    def device(self, _: int) -> AbstractContextManager[None]:
        return nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, *_: Any) -> None:
        return None


def register() -> torch.device:
    """The accelerator, for as long as this process lives."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    return torch.device(NAME, 0)


def traced(name: str, device: torch.device) -> tuple[dict[str, Any], set[str]]:
    """Bytes of each choice of a family, by segment, and the threads in which backward ran.

    Attention is computed by matrix products: kernels of it differ between devices.
    """
    module, threads = build(name), set[str]()

    def run(batch: Any) -> Tensor:
        loss = module.loss(batch)
        loss.register_hook(lambda _: threads.add(threading.current_thread().name))
        return loss

    batch = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), module.batch(_NUM_SAMPLES))
    with without_values(module), sdpa_kernel(SDPBackend.MATH):
        trace = trace_step(StepRunner(module, batch, _NUM_SAMPLES, run, device), CHOICES)
    of_choices = {"keep": trace.activations, **trace.saving_less}
    found = {choice: {size: [*map(asdict, parts)] for size, parts in of.items()} for choice, of in of_choices.items()}
    return found, threads


def compared(names: Sequence[str]) -> list[dict[str, Any]]:
    """Findings of a process that has the accelerator on these families, one after the other.

    Raises:
        RuntimeError: the process failed.
    """
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.testbed.emulated.accelerator", *names]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"Expected {' '.join(command[1:])} to end well, got {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(names: Sequence[str]) -> None:
    """Writes for each family its choices, segments and bytes, those that differ from CPU's, and backward's threads."""
    device = register()
    for name in names:
        (on_cpu, _), (there, threads) = traced(name, torch.device("cpu")), traced(name, device)
        row = {
            "family": name,
            "choices": sorted(there),
            "choices_on_cpu": sorted(on_cpu),
            "num_segments": sum(len(parts) for of in there.values() for parts in of.values()),
            "saved_bytes": sum(part["saved_bytes"] for of in there.values() for parts in of.values() for part in parts),
            "num_different": sum(
                part != other
                for choice in on_cpu.keys() & there.keys()
                for size, parts in on_cpu[choice].items()
                for part, other in zip(parts, there[choice][size], strict=True)
            ),
            "threads": sorted(threads),
        }
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
