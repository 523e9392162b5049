"""Seconds of recorded operations: measured one by one on the device at hand, or bounded from a device's rates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_osdp.errors import ConfigurationError, UntraceableError
from lightning_osdp.profiler.machine.memory import is_out_of_memory
from lightning_osdp.profiler.timing.operations import Operand, Operation
from lightning_osdp.profiler.timing.step_time import synchronize

_REPEATS = 3
_REPEAT_BUDGET_S = 0.5
"""What takes longer than this all together is not repeated further."""
_CALLS_IN_FLIGHT = 10
"""Calls between two synchronizations of a device that queues them: in a step launches hide behind kernels."""


def segment_seconds(
    operations: Mapping[int, Counter[Operation]], seconds_of: Callable[[Operation], float]
) -> dict[int, float]:
    """Seconds of all operations of each segment; each distinct operation is asked for once.

    Args:
        operations: of an `OperationRecorder`.
        seconds_of: the cost of one call, such as `replayed_s` or `roofline_s` with its other arguments given.
    """
    distinct = {operation for counter in operations.values() for operation in counter}
    seconds = {operation: seconds_of(operation) for operation in distinct}
    return {
        segment: sum(count * seconds[operation] for operation, count in counter.items())
        for segment, counter in operations.items()
    }


def replayed_s(operation: Operation, device: torch.device) -> float:
    """Seconds of one call: the fastest of a few on tensors made for it, after one to warm up.

    Floating-point operands are random in [0, 1), all others zero, which is a valid index everywhere. Only the operands
    and results of this operation are alive meanwhile, with the gaps of those that are slices; random number generators
    are as before. Operands may be in a cache that in a step had other things to hold.

    Args:
        operation: as recorded for this kind of device.
        device: what to wait for.

    Raises:
        UntraceableError: it cannot be run on such values, such as a factorisation of a singular matrix.
    """
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            arguments = _made(operation.arguments)
            keywords = {name: _made(value) for name, value in operation.keywords}
            return _fastest_s(lambda: operation.function(*arguments, **keywords), device)
    except Exception as error:  # an operation may do anything with values that it does not expect
        if is_out_of_memory(error):
            raise
        raise UntraceableError(
            f"Expected {operation.function} to run on random numbers and zeros of the shapes that the step gives it,"
            f" but it failed: {error!r}. Profile it with real parameters."
        ) from error


def roofline_s(operation: Operation, flops_per_s: Mapping[torch.dtype, float], bytes_per_s: float) -> float:
    """Seconds of one call on a device that one does not have: what takes longer, computing or moving its bytes.

    Args:
        operation: as recorded.
        flops_per_s: floating-point operations per second by the dtype of the first floating-point operand.
        bytes_per_s: bytes per second to and from the device's memory.

    Raises:
        ConfigurationError: there is no rate for a dtype that the operation computes in.

    References:
        Williams, Waterman, Patterson: Roofline, Communications of the ACM 52(4), 2009.
    """
    moving_s = operation.moved_bytes / bytes_per_s
    if operation.flops == 0:
        return moving_s
    dtype = next(operand.dtype for operand in operation.operands if operand.dtype.is_floating_point)
    if dtype not in flops_per_s:
        raise ConfigurationError(
            f"Expected the rate of {dtype}, in which {operation.function} computes, got rates of {[*flops_per_s]}."
            " Add it to flops_per_s."
        )
    return max(operation.flops / flops_per_s[dtype], moving_s)


def _made(value: Any) -> Any:
    if isinstance(value, Operand):
        return _tensor(value)
    return tuple(_made(item) for item in value) if isinstance(value, tuple) else value


def _tensor(operand: Operand) -> Tensor:
    is_float = operand.dtype.is_floating_point or operand.dtype.is_complex
    # torch has no random numbers of one byte.
    make = torch.rand if is_float and operand.dtype.itemsize > 1 else torch.zeros
    memory = make(operand.num_elements_spanned, dtype=operand.dtype, device=operand.device)
    return memory.view(operand.shape) if operand.strides is None else memory.as_strided(operand.shape, operand.strides)


def _fastest_s(call: Callable[[], object], device: torch.device) -> float:
    num_calls = 1 if device.type == "cpu" else _CALLS_IN_FLIGHT
    start = time.perf_counter()
    call()
    synchronize(device)
    best = float("inf")
    for _ in range(_REPEATS):
        before = time.perf_counter()
        for _ in range(num_calls):
            call()
        synchronize(device)
        after = time.perf_counter()
        best = min(best, (after - before) / num_calls)
        if after - start > _REPEAT_BUDGET_S:
            break
    return best
