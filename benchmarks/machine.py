"""On what a number was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """Returns processor, cores and interpreter; never a host's name."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():  # Linux; elsewhere the platform knows
        names = (line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line)
        model = next(names, model)
    return f"{model}, {os.cpu_count()} cores, {platform.python_implementation()} {platform.python_version()}"
