"""An optimizer step that is to be judged: by its seconds and bytes, in any modes and under any engine."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Samples of one rank."""

    micro_batch_size: int
    """b: samples per rank and micro-batch."""
    num_micro_batches: int = 1
    """K: micro-batches per optimizer step."""

    @property
    def num_samples(self) -> int:
        """Samples of a rank in an optimizer step, b * K."""
        return self.micro_batch_size * self.num_micro_batches


@dataclass(frozen=True, kw_only=True)
class Step:
    """Model, units, ranks and samples of one optimizer step."""

    profile: ModelProfile
    units: tuple[UnitProfile, ...]
    """Partition of the profile's operators."""
    cluster: Cluster
    workload: Workload
