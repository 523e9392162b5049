"""The Profiler of the paper: (model, batch, process group) -> bytes and seconds of every operator, and the links."""

from __future__ import annotations

from lightning_osdp.profiler.census import Census
from lightning_osdp.profiler.cluster import measure_cluster
from lightning_osdp.profiler.halves import why_not_mean
from lightning_osdp.profiler.live_bytes import LiveBytes
from lightning_osdp.profiler.loss import loss_in
from lightning_osdp.profiler.memory import CUDA_HEADROOM, default_memory_limit_bytes, is_out_of_memory
from lightning_osdp.profiler.model import profile_model
from lightning_osdp.profiler.operators import fingerprint
from lightning_osdp.profiler.precision import ComputePrecision
from lightning_osdp.profiler.resize import resized
from lightning_osdp.profiler.snapshot import untouched
from lightning_osdp.profiler.valueless import without_values

__all__ = [
    "CUDA_HEADROOM",
    "Census",
    "ComputePrecision",
    "LiveBytes",
    "default_memory_limit_bytes",
    "fingerprint",
    "is_out_of_memory",
    "loss_in",
    "measure_cluster",
    "profile_model",
    "resized",
    "untouched",
    "why_not_mean",
    "without_values",
]
