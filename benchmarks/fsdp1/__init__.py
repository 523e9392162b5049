"""FSDP1, ``FullyShardedDataParallel``, described: what it allocates and does in a step, so that it can be predicted."""

from benchmarks.fsdp1.engine import FSDP1

__all__ = ["FSDP1"]
