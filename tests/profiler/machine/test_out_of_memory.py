"""Errors of memory, other errors, and those that no device survives."""

import pytest
import torch

from lightning_osdp.profiler import is_out_of_memory, raise_if_fatal


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("The size of tensor a (7) must match the size of tensor b (53)"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_are_told_apart(error, expected):
    assert is_out_of_memory(error) is expected


def test_the_real_allocator_on_cpu_is_recognised():
    with pytest.raises(RuntimeError) as found:
        torch.empty(2**60, dtype=torch.int8)
    assert is_out_of_memory(found.value)


@pytest.mark.parametrize(
    ("error", "is_fatal"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
        (RuntimeError("The size of tensor a (7) must match the size of tensor b (53)"), False),
    ],
)
def test_errors_that_break_a_device_are_raised_again(error, is_fatal):
    if is_fatal:
        with pytest.raises(type(error)):
            raise_if_fatal(error)
    else:
        raise_if_fatal(error)
