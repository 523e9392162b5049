"""FSDP1's rules."""

from benchmarks.fsdp1.engine import FSDP1

__all__ = ["FSDP1"]
