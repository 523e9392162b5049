"""Memory of the device and the host: the default limit, and errors of memory that runs out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from lightning_osdp.core.cluster import CUDA_HEADROOM

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
"""Texts of a RuntimeError of torch's allocator on CPU (Linux, Windows), of the CUDA runtime and NCCL, of CUDA's
libraries."""

_CUDA_ERROR = "CUDA error: "
"""Text of a RuntimeError of the CUDA runtime and its libraries."""

_WIDTH = 64
"""Width of matrices that are multiplied to have libraries allocate."""

_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def is_out_of_memory(error: BaseException) -> bool:
    """Tells if an error means that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def raise_if_fatal(error: BaseException) -> None:
    """Raises an error again if its device computes nothing any more, as after an illegal access to memory.

    Code that catches an error to try another way calls this first: on such a device all else fails, too, with errors
    that name other places. Memory that runs out is no such error.
    """
    is_of_device = isinstance(error, torch.AcceleratorError) or _CUDA_ERROR in str(error)
    if is_of_device and not is_out_of_memory(error):
        raise error


def default_memory_limit_bytes(device: torch.device, *, local_ranks: int, planned_bytes: int = 0) -> int:
    """Bytes that one rank may use: free memory of the GPU less a headroom, or a share of the machine's memory on CPU.

    Planned bytes are on the GPU already and counted by plans, such as those of a model that was created there.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        # memory that this process has cached is free to it
        free += torch.cuda.memory_reserved(device) - allocated
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
        return int((min(free, allowed) + planned_bytes) * (1 - CUDA_HEADROOM))
    return available_host_bytes() // local_ranks


def library_workspace_bytes(device: torch.device) -> int:
    """Bytes of a GPU that libraries take once they multiply matrices, and keep; none on CPU.

    cuBLAS has a workspace for each stream in each thread. A step has two threads: forward runs in the thread of this
    call, backward in autograd's. [Unvalidated on CUDA.]

    References:
        aten/src/ATen/cuda/CublasHandlePool.cpp (``getCurrentCUDABlasHandle``).
    """
    if device.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    _multiply(device)
    return torch.cuda.memory_allocated(device) - before


def _multiply(device: torch.device) -> None:
    """Runs forward and backward of products with and without a bias, which libraries do in different ways."""
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=device, requires_grad=True)
        product = torch.nn.functional.linear(values @ values, values, values[0])
        torch.autograd.grad(product.sum(), values)


def empty_cache(device: torch.device) -> None:
    """Frees memory that the allocator of a GPU has cached: NCCL and other libraries allocate beside it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def available_host_bytes() -> int:
    """Memory that the machine can give without swapping, within the limits of the control groups around us."""
    available = _number(_MEMINFO, "MemAvailable:")
    # only Linux tells how much is free
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([installed if available is None else available * 1024, *_cgroup_available_bytes()])


def _cgroup_available_bytes() -> Iterator[int]:
    """Limit less usage of every control group of this process; file cache can be dropped, so it does not count as used.

    References:
        Linux, Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.current, memory.stat) and
        cgroup-v1/memory.rst.
    """
    for folder in _own_cgroups():
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            if (folder / limit).exists() and (folder / usage).exists():
                text = (folder / limit).read_text().strip()
                if text.isdigit():  # else "max"
                    cached_bytes = _number(folder / "memory.stat", cache) or 0
                    yield max(0, int(text) - int((folder / usage).read_text()) + cached_bytes)


def _own_cgroups() -> set[Path]:
    """Folders of this process's control groups and those above; in a container the process's own group is topmost."""
    folders = {_CGROUPS, _CGROUPS / "memory"}
    for line in _lines(_OWN_CGROUPS):
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            group = _CGROUPS / ("memory" if controllers else "") / path.lstrip("/")
            folders.update(folder for folder in (group, *group.parents) if _CGROUPS in folder.parents)
    return folders


def _number(path: Path, name: str) -> int | None:
    """Number in the line of a file that begins with a name."""
    return next((int(line.split()[1]) for line in _lines(path) if line.split()[0] == name), None)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
