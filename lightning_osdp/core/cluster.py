"""What the planner knows of the machines: ranks, collectives' cost, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_osdp.core.text.stored import Stored


@dataclass(frozen=True, kw_only=True)
class Link:
    """Cost of a ring collective: alpha and beta of the paper's equation 2."""

    latency_s: float
    """alpha: seconds per ring step, whatever the message's size."""
    seconds_per_byte: float
    """beta: seconds per byte sent by one rank."""
    fit_error: float = 0.0
    """Largest relative difference between this line and the times that it was fitted to."""

    def ring_s(self, num_bytes: float, world_size: int) -> float:
        """Seconds of one ring all-gather or reduce-scatter: ``(N-1) alpha + (N-1)/N S beta``.

        Args:
            num_bytes: S, bytes of the whole (gathered) tensor.
            world_size: N, number of ranks in the ring.

        References:
            OSDP (Jiang et al. 2022), equation 2, after Thakur et al. 2005.
        """
        steps = world_size - 1
        return steps * self.latency_s + steps / world_size * num_bytes * self.seconds_per_byte


UNIT_PARTS = ("gather", "flatten", "reduce", "accumulate")
"""What the runtime does for a unit beside collectives: for each all-gather (views, allocating and freeing); in each
micro-batch (hooks, one tensor of all gradients); for each reduce-scatter; and where one is left out."""


@dataclass(frozen=True, kw_only=True)
class UnitOverhead:
    """What the runtime takes for one part of a unit's work, beside collectives: affine in its parameters."""

    fixed_s: float = 0.0
    seconds_per_byte: float = 0.0
    """Gathered."""
    seconds_per_tensor: float = 0.0
    """Each parameter has views, or a tensor, of its own."""

    def seconds(self, gathered_bytes: float, num_tensors: int) -> float:
        """Seconds of this part, once."""
        return self.fixed_s + self.seconds_per_byte * gathered_bytes + self.seconds_per_tensor * num_tensors


@dataclass(frozen=True, kw_only=True)
class Cluster(Stored):
    """The ranks that train together, as seen from one of them."""

    world_size: int
    """N: number of data-parallel ranks."""
    all_gather: Link
    reduce_scatter: Link
    unit_overhead: Mapping[str, UnitOverhead] = field(default_factory=dict)
    """One of `UNIT_PARTS` -> what the runtime takes for it, each time; empty where it was not measured."""
    num_nodes: int = 1
    backend: str = ""
    """Name of the process group's backend, for reports."""
    overlaps: bool = False
    """Whether collectives run beside computing; a backend that blocks (gloo) has one thing happen at a time."""
    reduce_scatter_copies: bool = True
    """Whether the backend copies what it reduces and scatters, as gloo does."""
    host_copy_s_per_byte: float = 0.0
    """Seconds per byte that is copied to host memory, or back; on CPU of a copy in memory."""
    memory_bytes: int | None = None
    """Bytes that one rank may use where the user sets no limit; None if unknown."""
