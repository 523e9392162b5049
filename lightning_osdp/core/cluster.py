"""Machines as the planner knows them: ranks, cost of collectives, memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_osdp.core.text.stored import Stored
from lightning_osdp.errors import ConfigurationError

CUDA_HEADROOM = 0.1
"""Fraction of the free device memory that a default limit leaves alone, for what no plan counts: rounding and
fragmentation of the caching allocator. [Assumption, not a measurement.]"""

MOST_RANKS = 2**20
"""Largest number of ranks that a plan or a question may name."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Cost of a ring collective: alpha and beta of the paper's equation 2, or measured ring steps."""

    latency_s: float
    """alpha: seconds per ring step, whatever the message's size."""
    seconds_per_byte: float
    """beta: seconds per byte sent by one rank."""
    steps: tuple[tuple[float, float], ...] = ()
    """Measured ring steps, as bytes that a rank sends and seconds, both ascending. Seconds are not affine in bytes, for
    protocols change with the size of messages."""

    def ring_s(self, num_bytes: float, world_size: int) -> float:
        """Seconds of one ring all-gather or reduce-scatter: ``(N-1) alpha + (N-1)/N S beta``, S of the whole tensor.

        Where steps were measured, ``(N-1) f(S/N)`` with f through them.

        References:
            OSDP (Jiang et al. 2022), equation 2, after Thakur et al. 2005.
        """
        return (world_size - 1) * self.step_s(num_bytes / world_size)

    def step_s(self, num_bytes: float) -> float:
        """Seconds of a ring step in which a rank sends ``num_bytes``.

        Seconds between two measured steps are interpolated. Fewer bytes than in the first step take its seconds; each
        byte beyond the last step takes `seconds_per_byte`.
        """
        steps = self.steps or ((0.0, self.latency_s),)
        index = bisect_left(steps, (num_bytes,))
        if index == 0:
            return steps[0][1]
        from_bytes, from_s = steps[index - 1]
        if index == len(steps):
            return from_s + (num_bytes - from_bytes) * self.seconds_per_byte
        to_bytes, to_s = steps[index]
        return from_s + (num_bytes - from_bytes) / (to_bytes - from_bytes) * (to_s - from_s)

    def at_rate(self, rate: float) -> Link:
        """Link with ``rate`` times the bytes/s; the latency of a ring step stays as it is."""
        return replace(
            self,
            seconds_per_byte=self.seconds_per_byte / rate,
            steps=tuple((size, self.latency_s + (seconds - self.latency_s) / rate) for size, seconds in self.steps),
        )

    def taking(self, times: float) -> Link:
        """Link on which all collectives take so many times as long."""
        return Link(
            latency_s=self.latency_s * times,
            seconds_per_byte=self.seconds_per_byte * times,
            steps=tuple((size, seconds * times) for size, seconds in self.steps),
        )


@dataclass(frozen=True, kw_only=True)
class Links:
    """Collectives over some of the ranks."""

    all_gather: Link
    reduce_scatter: Link
    all_reduce: Link
    """Ring all-reduce: its step is one of a reduce-scatter and one of an all-gather."""

    def at_rate(self, rate: float) -> Links:
        """Links with ``rate`` times the bytes/s."""
        return Links(
            all_gather=self.all_gather.at_rate(rate),
            reduce_scatter=self.reduce_scatter.at_rate(rate),
            all_reduce=self.all_reduce.at_rate(rate),
        )

    def taking(self, times: float) -> Links:
        """Links on which all collectives take so many times as long."""
        return Links(
            all_gather=self.all_gather.taking(times),
            reduce_scatter=self.reduce_scatter.taking(times),
            all_reduce=self.all_reduce.taking(times),
        )


UNIT_PARTS = ("gather", "flatten", "reduce", "accumulate", "stay")
"""Work of the runtime for a unit beside collectives: for each all-gather (views, allocating and freeing); in each
micro-batch (hooks, one tensor of all gradients); for each reduce-scatter; for each reduce-scatter that is left out; in
each step, in place of all that, where the unit is resident (showing its weights, and its shards again); in each
micro-batch where it is trained, for each rank has all of it. On CPU a collective takes of computing beside it, too."""


@dataclass(frozen=True, kw_only=True)
class UnitOverhead:
    """Seconds of the runtime for one of `UNIT_PARTS`: affine in the unit's parameters, or in their gradients."""

    fixed_s: float = 0.0
    seconds_per_byte: float = 0.0
    """Seconds per byte of gathered parameters, or of their gradients."""
    seconds_per_tensor: float = 0.0
    """Seconds per parameter, each of which has views, or a gradient, of its own."""

    def seconds(self, num_bytes: float, num_tensors: int) -> float:
        """Seconds of this part, once."""
        return self.fixed_s + self.seconds_per_byte * num_bytes + self.seconds_per_tensor * num_tensors

    def taking(self, times: float) -> UnitOverhead:
        """Overhead of so many times as many seconds."""
        return UnitOverhead(
            fixed_s=self.fixed_s * times,
            seconds_per_byte=self.seconds_per_byte * times,
            seconds_per_tensor=self.seconds_per_tensor * times,
        )


@dataclass(frozen=True, kw_only=True)
class Contention:
    """Slowdown of computing, and of a collective that runs beside it, by each other; 1 on both sides: none.

    Raises:
        ConfigurationError: a factor is below 1, or the delay below 0.
    """

    computing: float = 1.0
    """Seconds of computing beside a collective over its seconds alone."""
    collectives: float = 1.0
    """Seconds of a collective beside computing over its seconds alone, but for the delay."""
    delay_s: float = 0.0
    """Seconds by which each collective beside computing ends later, however few bytes it sends: as where more ranks
    compute than there are cores, for which threads of the backend wait."""

    def __post_init__(self) -> None:
        if not (self.computing >= 1 and self.collectives >= 1 and self.delay_s >= 0):
            raise ConfigurationError(
                f"Expected factors of at least 1, and a delay of at least 0, in {self!r}: what runs beside others is"
                " slowed. Give 1 and 0 where it is not."
            )

    def of_collective(self, seconds: float) -> float:
        """Seconds beside computing over those alone, of a collective that takes so many alone."""
        return self.collectives + (self.delay_s / seconds if seconds > 0 else 0.0)


@dataclass(frozen=True, kw_only=True)
class Cluster(Stored):
    """The ranks that train together, as seen from one of them."""

    world_size: int
    """N: number of data-parallel ranks."""
    all_gather: Link
    reduce_scatter: Link
    unit_overhead: Mapping[str, UnitOverhead] = field(default_factory=dict)
    """Overhead of each of `UNIT_PARTS`; empty where overhead was not measured."""
    call_s: float = 0.0
    """Seconds, in forward and backward, of hooks around a call of a module that finds its unit there; 0 where that was
    not measured."""
    slice_s: float = 0.0
    """Seconds, likewise, of each slice of an operator after the first beside what the operator computes."""
    backend: str = ""
    """Name of the process group's backend, for reports."""
    overlaps: bool = False
    """Collectives run beside computing; where none do, one thing happens at a time."""
    waits_for: tuple[str, ...] = ()
    """Kinds of collectives, by event, that the host waits for although others run beside computing."""
    has_streams: bool = True
    """True if the device has streams, where synchronous all-gathers begin by themselves; on CPU the host waits."""
    contention: Contention = field(default_factory=Contention)
    """Slowdown of computing and collectives that overlap."""
    reduce_scatter_copies: bool = True
    """True if a reduce-scatter of the backend holds a copy of its input, as gloo's does."""
    host_copy_s_per_byte: float = 0.0
    """Seconds per byte that is copied to host memory, or back; on CPU of a copy in memory."""
    host_copies_overlap: bool = False
    """Copies to host memory run beside computing, for which memory on the device is held longer."""
    library_workspace_bytes: int = 0
    """Bytes that libraries take of the device in the first step, and keep, such as cuBLAS's workspaces."""
    memory_bytes: int | None = None
    """Bytes that one rank may use where the user sets no limit; None if unknown."""
    host_memory_bytes: int | None = None
    """Bytes of the host's memory that are free for one rank, beside what it has; None if unknown."""
    node_size: int | None = None
    """Ranks of one node, which follow each other; None: all are in one."""
    within_node: Links | None = None
    """Links over the ranks of a node, in all nodes at a time; None where they were not measured."""
    between_nodes: Links | None = None
    """Links over the ranks that have the same place in their nodes, for all places at a time."""
    all_reduce: Link | None = None
    """All-reduce over all ranks, where there are several nodes; see `Links.all_reduce`."""
    agreement: Link | None = None
    """All-to-all of few numbers by way of hosts, see `agreement_s`; None where it was not measured."""

    @property
    def has_nodes(self) -> bool:
        """True for several nodes with several ranks each; otherwise all links are equal."""
        size, ranks = self.node_size, self.world_size
        return size is not None and 1 < size < ranks and ranks % size == 0

    def num_ranks(self, over: str) -> int:
        """Number of ranks: of ``all``, of a ``node``, or of ``one``."""
        return {"all": self.world_size, "node": self.node_size or self.world_size, "one": 1}[over]

    def as_if(self, world_size: int, *, link_rate: float = 1.0) -> Cluster:
        """Cluster with ``world_size`` ranks, and ``link_rate`` times the bytes/s on all links.

        Ranks that fit in one node have the links inside of the node, where these were measured.
        """
        ring = self._links("node" if world_size <= self.num_ranks("node") else "all")
        return replace(
            self,
            world_size=world_size,
            all_gather=ring.all_gather.at_rate(link_rate),
            reduce_scatter=ring.reduce_scatter.at_rate(link_rate),
            within_node=self.within_node and self.within_node.at_rate(link_rate),
            between_nodes=self.between_nodes and self.between_nodes.at_rate(link_rate),
            all_reduce=self.all_reduce and self.all_reduce.at_rate(link_rate),
        )

    def all_gather_s(self, num_bytes: float, *, over: str = "all") -> float:
        """Seconds of one all-gather of so many bytes of the whole tensor, over ``all`` ranks or those of a ``node``.

        Where links inside of nodes were not measured, they are as those over all ranks.
        """
        return self._links(over).all_gather.ring_s(num_bytes, self.num_ranks(over))

    def reduce_scatter_s(self, num_bytes: float, *, over: str = "all") -> float:
        """Seconds of one reduce-scatter of so many bytes of the whole tensor, over the ranks of `all_gather_s`."""
        return self._links(over).reduce_scatter.ring_s(num_bytes, self.num_ranks(over))

    def all_to_all_s(self, num_bytes: float, *, over: str) -> float:
        """Seconds of one all-to-all of ``num_bytes`` that each rank cuts into parts, over the ranks of `all_gather_s`.

        One part is for itself. It is not measured: a rank sends as many bytes as in an all-gather of so many, in as
        many messages.
        """
        return self.all_gather_s(num_bytes, over=over)

    def agreement_s(self, num_bytes: float) -> float:
        """Seconds in which all ranks tell each other so many bytes by way of their hosts: an all-to-all, as of gloo.

        Where it was not measured, it is two all-gathers on the links over all ranks, which are those of devices.
        """
        if self.agreement is None:
            return 2 * self.all_gather_s(num_bytes)
        return self.agreement.ring_s(num_bytes, self.world_size)

    def _links(self, over: str) -> Links | Cluster:
        return self if over == "all" or self.within_node is None else self.within_node

    def all_reduce_s(self, num_bytes: float) -> float:
        """Seconds of one all-reduce of so many bytes over all ranks; as `all_reduce_between_s` where not measured."""
        if self.all_reduce is not None:
            return self.all_reduce.ring_s(num_bytes, self.world_size)
        return self.reduce_scatter_s(num_bytes) + self.all_gather_s(num_bytes)

    def all_reduce_between_s(self, num_bytes: float) -> float:
        """Seconds of one all-reduce of so many bytes over the ranks that have the same place in their nodes.

        Where that was not measured, it is a reduce-scatter and an all-gather on the links over all ranks.
        """
        num_nodes = self.world_size // self.num_ranks("node")
        if self.between_nodes is not None:
            return self.between_nodes.all_reduce.ring_s(num_bytes, num_nodes)
        return self.reduce_scatter.ring_s(num_bytes, num_nodes) + self.all_gather.ring_s(num_bytes, num_nodes)


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates that a device reaches, for planning without the device; a data sheet's numbers are too good.

    Raises:
        ConfigurationError: a rate is not positive, or those of operations are not by dtype.

    Example:
        >>> DeviceRates(flops_per_s={"float32": 30e12, "bfloat16": 400e12}, bytes_per_s=2.5e12).bytes_per_s
        2500000000000.0
    """

    flops_per_s: Mapping[str, float]
    """Floating-point operations per second of large matrix products, by dtype."""
    bytes_per_s: float
    """Bytes per second to and from its memory."""
    is_cuda: bool = False
    """A CUDA device, on which torch's optimizers update all parameters of a group at once (foreach)."""
    host_bytes_per_s: float | None = None
    """Bytes per second to and from its host's memory of updates there, beside those of the host's other devices; None
    if unknown."""
    attention_forward: float = 1.0
    """Rate of attention in forward, over many tokens on a CUDA device, over that of matrix products; by default that of
    torch's kernels on A100 and H200, see ``docs/research/gpus/published.md``."""
    attention_backward: float = 0.88
    """Likewise in backward."""

    def __post_init__(self) -> None:
        if not isinstance(self.flops_per_s, Mapping):
            raise ConfigurationError(
                f"Expected flops_per_s by dtype, got {self.flops_per_s!r}. Name the dtypes that the model computes in:"
                f' flops_per_s={{"float32": ..., "bfloat16": {self.flops_per_s!r}}}.'
            )
        others = ("bytes_per_s", "host_bytes_per_s", "attention_forward", "attention_backward")
        rates = {**self.flops_per_s, **{name: getattr(self, name) for name in others}}
        for name, rate in rates.items():
            if rate is not None and not rate > 0:
                raise ConfigurationError(f"Expected rates of a device to be positive, got {rate!r} for {name!r}.")
