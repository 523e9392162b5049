"""The memory limit of a user who sets none."""

from __future__ import annotations

from pathlib import Path

import torch

CUDA_HEADROOM = 0.1
"""Fraction of the free device memory that a default limit leaves alone: allocator rounding and fragmentation, and
the communicator's buffers, which no plan counts. [Assumption, not a measurement.]"""
CPU_HEADROOM = 0.1
"""The same for the machine's available memory: interpreter, libraries and loader workers."""


def default_memory_limit_bytes(device: torch.device, *, local_ranks: int) -> int:
    """Bytes that one rank may use: what is free now less a headroom; on CPU the local ranks share the machine's.

    Args:
        device: where the rank trains.
        local_ranks: ranks on this machine.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What this process has cached already is free to it.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free * (1 - CUDA_HEADROOM))
    return int(available_host_bytes() * (1 - CPU_HEADROOM)) // local_ranks


def available_host_bytes() -> int:
    """Memory that the machine can give without swapping, within the limit of the control group if there is one."""
    available = _meminfo_available_bytes()
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit_path, usage_path = Path(limit), Path(usage)
        if limit_path.exists() and usage_path.exists():
            text = limit_path.read_text().strip()
            if text.isdigit():
                available = min(available, max(0, int(text) - int(usage_path.read_text())))
    return available


def _meminfo_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("Expected /proc/meminfo to have a line 'MemAvailable:'.")
