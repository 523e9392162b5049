"""The Profiler of the paper: (model, batch, process group) -> bytes and seconds of every operator, and the links."""

from __future__ import annotations

from lightning_osdp.profiler.live_tensors import Census, LiveBytes
from lightning_osdp.profiler.machine.cluster import measure_cluster
from lightning_osdp.profiler.machine.memory import (
    default_memory_limit_bytes,
    empty_cache,
    is_out_of_memory,
    raise_if_fatal,
)
from lightning_osdp.profiler.model import TrainingStep, profile_model
from lightning_osdp.profiler.optimizer import replica_of
from lightning_osdp.profiler.precision import ComputePrecision
from lightning_osdp.profiler.step.fake_model import stand_in, without_values
from lightning_osdp.profiler.step.run_step import halves_of, loss_in, resized, samples_in, why_not_mean
from lightning_osdp.profiler.step.same_state import why_state_differs
from lightning_osdp.profiler.step.snapshot import snapshot, tensors_in, untouched
from lightning_osdp.profiler.timing.step_time import Together
from lightning_osdp.profiler.tracing.operators import check_parameters, fingerprint

__all__ = [
    "Census",
    "ComputePrecision",
    "LiveBytes",
    "Together",
    "TrainingStep",
    "check_parameters",
    "default_memory_limit_bytes",
    "empty_cache",
    "fingerprint",
    "halves_of",
    "is_out_of_memory",
    "loss_in",
    "measure_cluster",
    "profile_model",
    "raise_if_fatal",
    "replica_of",
    "resized",
    "samples_in",
    "snapshot",
    "stand_in",
    "tensors_in",
    "untouched",
    "why_not_mean",
    "why_state_differs",
    "without_values",
]
