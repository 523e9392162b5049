"""Checks that need no device: a made-up clock and memory, an accelerator and kernels of fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.measures.gpu.finding import Check, Finding
from benchmarks.testbed.emulated.accelerator import compared
from benchmarks.testbed.emulated.cuda import FakeCuda
from lightning_osdp.callbacks.plan_monitor import StepTimer
from lightning_osdp.profiler import LiveBytes, default_memory_limit_bytes, is_out_of_memory
from lightning_osdp.profiler.machine.stopwatch import fastest_s
from lightning_osdp.profiler.timing.operation_time import OperationRecorder

FAMILIES = ("odd_mlp", "mingpt", "convolutional")
"""Families of operations that are one kernel on both: dropout's mask differs on CPU, SiLU's backward has several."""
ERRORS = {
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB": True,
    "CUDA error: out of memory": True,
    "CUDA driver error: out of memory": True,
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": True,
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED": True,
    "NCCL Error 1: unhandled cuda error. Last error: Cuda failure 2 'out of memory'": True,
    "CUDA error: device-side assert triggered": False,
    "CUDA error: an illegal memory access was encountered": False,
    "NCCL error: remote process exited or there was a network error": False,
}
"""Texts of errors of CUDA and its libraries -> True where they say that memory ran out."""
BATCH, HEADS, LENGTH, DEPTH = 2, 4, 128, 64


def clock(_device: torch.device) -> Iterator[Finding]:
    """The stopwatch and the timer of steps on a device whose kernels take what they are told."""
    cuda = torch.device("cuda", 0)
    for launch_s, kernel_s in ((5e-6, 1e-6), (5e-6, 5e-3), (40e-6, 8e-6)):
        with FakeCuda(launch_s=launch_s).installed() as device:
            found_s = fastest_s(partial(device.launch, kernel_s), cuda, repeats=3, num_calls=200)
        numbers = {"launch_us": launch_s * 1e6, "kernel_us": kernel_s * 1e6, "found_us": found_s * 1e6}
        yield Finding("emulated clock: kernels", is_good=abs(found_s / kernel_s - 1) < 1e-6, numbers=numbers)
    with FakeCuda().installed() as device:
        steps = StepTimer(cuda)
        for _ in range(3):
            steps.start()
            device.launch(0.5)
            steps.stop(num_samples=4)
            steps.end_step()
        early, late = list(steps.finished()), list(steps.finished(wait=True))
    is_good = not early and [samples for _, samples in late] == [4] * 3
    is_good = is_good and all(abs(seconds - 0.5) < 1e-4 for seconds, _ in late)
    yield Finding("emulated clock: steps", is_good, {"seconds": [round(seconds, 6) for seconds, _ in late]})


def memory(_device: torch.device) -> Iterator[Finding]:
    """The default limit of a made-up device, and which errors say that memory ran out."""
    with FakeCuda(total_bytes=2**30).installed() as device:
        device.allocate(2**29)
        device.allocate(-(2**28))
        limit = default_memory_limit_bytes(torch.device("cuda", 0), local_ranks=2)
        try:
            device.allocate(2**30)
        except torch.OutOfMemoryError as error:
            is_told = is_out_of_memory(error)
        else:
            is_told = False
    yield Finding("emulated memory", limit == int(0.9 * 3 * 2**28) and is_told, {"limit_MiB": limit / 2**20})
    wrong = [text for text, expected in ERRORS.items() if is_out_of_memory(RuntimeError(text)) != expected]
    yield Finding("texts of errors", not wrong, {"texts": len(ERRORS), "wrong": wrong})


def accelerator(_device: torch.device) -> Iterator[Finding]:
    """Traces of fake tensors on an accelerator, with its own thread in backward, against those on CPU."""
    for row in compared(FAMILIES):
        is_apart = bool(row["threads"]) and "MainThread" not in row["threads"]
        is_same = row["num_different"] == 0 and row["choices"] == row["choices_on_cpu"]
        numbers = {key: value for key, value in row.items() if key != "family"}
        yield Finding(f"fake accelerator: {row['family']}", is_apart and is_same, numbers)


def _query(dtype: torch.dtype) -> Tensor:
    return torch.empty(BATCH, HEADS, LENGTH, DEPTH, device="cuda", dtype=dtype)


aten = torch.ops.aten
_ATTENTIONS: Mapping[str, Callable[[Tensor], Any]] = {
    "flash": lambda q: aten._scaled_dot_product_flash_attention(q, q, q),
    "efficient": lambda q: aten._scaled_dot_product_efficient_attention(q, q, q, None, True),
    "cudnn": lambda q: aten._scaled_dot_product_cudnn_attention(q, q, q, None, True),
}


def attention(_device: torch.device) -> Iterator[Finding]:
    """Kernels of attention on fake tensors on CUDA: what they keep, and that their operations are counted."""
    flops = 4 * BATCH * HEADS * LENGTH * LENGTH * DEPTH
    for name, attend in _ATTENTIONS.items():
        with FakeTensorMode(), torch.no_grad():
            query = _query(torch.bfloat16)
            with OperationRecorder() as recorder, LiveBytes("cuda") as live:
                kept = attend(query)
                num_bytes = live.current_bytes
        operations = [each for counter in recorder.operations.values() for each in counter.elements()]
        # the output, and one sum of exponentials in float32 for each row, rounded up
        least = query.nbytes + 4 * BATCH * HEADS * LENGTH
        is_good = least <= num_bytes <= least * 1.1 and [each.flops for each in operations] == [flops]
        yield Finding(f"fake attention: {name}", is_good, {"kept_bytes": num_bytes, "least": least, "parts": len(kept)})


EMULATED: Mapping[str, Check] = {
    "clock": clock,
    "memory": memory,
    "accelerator": accelerator,
    "attention": attention,
}
