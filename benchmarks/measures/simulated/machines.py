"""Machines that are not here, and models of the sizes that are trained on them, as numbers and names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.families.stages import Stages
from lightning_osdp import Cluster, DeviceRates
from lightning_osdp.core.cluster import Link, UnitOverhead


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs that train together; all rates are what programs reach, not what data sheets promise."""

    name: str
    num_ranks: int
    dtype: str
    """Of computing: ``float32``, or ``bfloat16`` for bf16-mixed."""
    flops_per_s: float
    """Of large matrix products in that dtype."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """That the ring carries past its slowest link, in one direction."""
    link_latency_s: float
    """Of one step of the ring, averaged over its links."""
    kernels_s: float = 5e-5
    """Of the small kernels that each unit takes in a micro-batch."""

    @property
    def rates(self) -> DeviceRates:
        """Of one GPU."""
        return DeviceRates(flops_per_s={self.dtype: self.flops_per_s}, bytes_per_s=self.memory_bytes_per_s)

    @property
    def cluster(self) -> Cluster:
        """As seen by the planner: NCCL, whose collectives run beside computing and copy nothing.

        A unit's gradients are made one tensor, then divided by the number of ranks: both read and write each of them.
        """
        link = Link(latency_s=self.link_latency_s, seconds_per_byte=1 / self.link_bytes_per_s)
        moved_s = 2 / self.memory_bytes_per_s
        return Cluster(
            world_size=self.num_ranks,
            all_gather=link,
            reduce_scatter=link,
            unit_overhead={
                "flatten": UnitOverhead(fixed_s=self.kernels_s, seconds_per_byte=moved_s),
                "reduce": UnitOverhead(seconds_per_byte=moved_s),
            },
            backend="nccl",
            overlaps=True,
            reduce_scatter_copies=False,
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer, by its sizes."""

    family: str
    layers: str
    """Blocks and their width, such as ``8 x 1024 + 4 x 2048``."""
    sequence_length: int
    """Tokens of a sample."""
    vocabulary_size: int

    @property
    def widths(self) -> list[int]:
        """Of each block."""
        stages = [stage.split(" x ") for stage in self.layers.split(" + ")]
        return [int(width) for num, width in stages for _ in range(int(num))]

    def on_meta(self) -> Stages:
        """The model without memory."""
        with torch.device("meta"):
            return Stages(self.widths, vocabulary_size=self.vocabulary_size, sequence_length=self.sequence_length)


TITANS = Machine(
    name="8 TITAN RTX, PCIe 3.0",
    num_ranks=8,
    dtype="float32",
    flops_per_s=12e12,
    memory_bytes_per_s=550e9,
    link_bytes_per_s=6e9,
    link_latency_s=10e-6,
)
"""The paper's: data sheets say 16.3 TFLOP/s, 672 GB/s, and 15.75 GB/s for sixteen lanes. These cards reach each other
through the host's memory, so every byte takes the lanes twice."""

NODE = Machine(
    name="8 H100, NVLink",
    num_ranks=8,
    dtype="bfloat16",
    flops_per_s=550e12,
    memory_bytes_per_s=2.6e12,
    link_bytes_per_s=340e9,
    link_latency_s=3e-6,
)
"""Data sheets say 989 TFLOP/s, 3.35 TB/s, and 450 GB/s in each direction."""

NODES = Machine(
    name="4 x 8 H100, 100 Gbit/s",
    num_ranks=32,
    dtype="bfloat16",
    flops_per_s=NODE.flops_per_s,
    memory_bytes_per_s=NODE.memory_bytes_per_s,
    link_bytes_per_s=11e9,
    link_latency_s=5e-6,
)
"""Four such nodes with one port of 12.5 GB/s each: the ring passes it once, so it is all the ring's."""
