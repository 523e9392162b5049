"""A machine that one need not have: nodes of equal devices, as the planner sees them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lightning_osdp.core.cluster import (
    CUDA_HEADROOM,
    MOST_RANKS,
    Cluster,
    Contention,
    DeviceRates,
    Link,
    Links,
    UnitOverhead,
)
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.machines.catalog import Catalog, Device, Interconnect, read_catalog

_SPEC = re.compile(
    r"\s*((?P<nodes>\d{1,7})\s*x\s*)?((?P<ranks>\d{1,7})\s+)?(?P<device>[^,]*[^,\s])\s*"
    r"(,\s*((?P<ports>\d{1,7})\s*x\s*)?(?P<gbit>\d{1,7}(\.\d+)?)\s*gbit(/s)?\s*)?",
    re.IGNORECASE,
)
CONTEXT_MIB = 1536
"""Memory of a device that is not free for tensors: the context and NCCL's buffers. [Assumption, not a measurement.]"""
PUBLISHED_RATES = (0.74, 1.12)
"""Least and most throughput of eager steps that others measured on GPUs, over what the catalog's rates predict of them
(``docs/research/gpus/published.md``)."""
_HOST_BYTES_PER_S = 1e11
"""Bytes per second to and from a host's memory that updates of all its ranks reach together. [Assumption, not a
measurement: a quarter of what eight channels of DDR4-3200 on each of two sockets have.]"""
_HOST_STEP_S = 2e-5
"""Seconds of a host to tell another one a few bytes over TCP, one after the other. [Assumption, not a measurement.]"""
_KERNELS_S = 5e-5
"""Seconds of small kernels for each unit and micro-batch. [Assumption, not a measurement.]"""
_CONTENTION = Contention(computing=1.1255, collectives=1.1255)
"""Published by Galvatron for its GPUs (hardware_configs of PKU-DAIR/Hetu-Galvatron), with one number for both sides;
its documentation calls 1.1 to 1.3 typical."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of equal GPUs that train together over NCCL."""

    nodes: int
    ranks_per_node: int
    device: Device
    peers: Interconnect
    """Link to the other devices of a node."""
    host: Interconnect
    """Link to the memory of the host."""
    network: Interconnect | None
    """Link of all ports of a node together; None with one node."""

    @classmethod
    def parse(cls, text: str) -> Machine:
        """Reads a machine from a text.

        Args:
            text: ``8 h100-sxm``; with several nodes ``4x8 h100-sxm, 400gbit``, where the rate is that of all ports of a
                node together, or ``4x8 h100-sxm, 8x400gbit``. In place of the name may be the path of a TOML file with
                one device, see `read_catalog`.

        Raises:
            ConfigurationError: the text has another form, or names a device that there is not.

        Example:
            >>> machine = Machine.parse("4x8 h100-sxm, 8x400gbit")
            >>> machine.world_size, machine.network.gb_per_s
            (32, 400.0)
        """
        match = _SPEC.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"Expected a machine such as '8 h100-sxm', or '4x8 h100-sxm, 400gbit' for four nodes of eight with 400"
                f" Gbit/s each, got {text!r}."
            )
        nodes, ranks = int(match["nodes"] or 1), int(match["ranks"] or 1)
        if not 1 <= nodes * ranks <= MOST_RANKS:
            raise ConfigurationError(
                f"Expected at least one node and one GPU in it, at most 2^20 in all, got {text!r}."
            )
        gbit = float(match["gbit"]) * int(match["ports"] or 1) if match["gbit"] else None
        if gbit == 0:
            raise ConfigurationError(f"Expected a network of more than 0 Gbit/s, got {text!r}.")
        if nodes > 1 and gbit is None:
            raise ConfigurationError(
                f"Expected the network between {nodes} nodes, as in '{nodes}x{ranks} {match['device']}, 400gbit', got"
                f" {text!r}."
            )
        catalog, device = _device(match["device"])
        per_gbit = catalog.link("network")
        return cls(
            nodes=nodes,
            ranks_per_node=ranks,
            device=device,
            peers=catalog.link(device.peers),
            host=catalog.link(device.host),
            network=None if nodes == 1 or gbit is None else replace(per_gbit, gb_per_s=gbit * per_gbit.gb_per_s),
        )

    def __str__(self) -> str:
        number = f"{self.nodes} nodes of {self.ranks_per_node}" if self.nodes > 1 else f"{self.ranks_per_node}"
        network = f", {self.network.gb_per_s * 8:g} Gbit/s each" if self.network else ""
        return f"{number} {self.device.title}{network}"

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def memory_bytes(self) -> int:
        """Bytes that the tensors of one rank may take, as a fit has it by default."""
        return int((self.device.memory_mib - CONTEXT_MIB) * 2**20 * (1 - CUDA_HEADROOM))

    @property
    def rates(self) -> DeviceRates:
        """Rates that a device reaches."""
        return DeviceRates(
            flops_per_s={name: rate * 1e12 * self.device.compute_reached for name, rate in self.device.tflops.items()},
            bytes_per_s=self.device.memory_gb_per_s * 1e9 * self.device.memory_reached,
            is_cuda=True,
        )

    @property
    def rates_with_host(self) -> DeviceRates:
        """Rates of a device and of its share of the host, whose ranks all update at once."""
        return replace(self.rates, host_bytes_per_s=_HOST_BYTES_PER_S / self.ranks_per_node)

    @property
    def cluster(self) -> Cluster:
        """Cluster of the machine's ranks and links under NCCL and ``fully_shard``.

        An all-gather is copied out into the parameters and gradients are copied in to be reduced: both read and write
        every element once.
        """
        ring, moved_s = self._ring(), 2 / self.rates.bytes_per_s
        cluster = Cluster(
            world_size=self.world_size,
            all_gather=ring,
            reduce_scatter=ring,
            unit_overhead={
                "gather": UnitOverhead(seconds_per_byte=moved_s),
                "flatten": UnitOverhead(fixed_s=_KERNELS_S),
                "reduce": UnitOverhead(seconds_per_byte=moved_s),
            },
            backend="nccl",
            overlaps=True,
            contention=_CONTENTION,
            reduce_scatter_copies=False,
            host_copy_s_per_byte=1 / self.host.bytes_per_s,
            host_copies_overlap=True,
            memory_bytes=self.memory_bytes,
            agreement=Link(latency_s=_HOST_STEP_S, seconds_per_byte=0.0),
        )
        if self.network is None:
            return cluster
        return replace(
            cluster,
            node_size=self.ranks_per_node,
            within_node=_links_over(self.peers),
            between_nodes=_links_over(self.network, num_senders=self.ranks_per_node),  # all pairs of peers send at once
            all_reduce=_both_ways(ring),
        )

    def _ring(self) -> Link:
        """Link of a ring over all ranks, which leaves each node once, by all of the node's ports.

        Every ring step waits for the slowest link. The latency is the mean over the ring's links, of which one for each
        node is the network.
        """
        latency_s, seconds_per_byte = self.peers.latency_us * 1e-6, 1 / self.peers.bytes_per_s
        if self.network is not None:
            latency_s += (self.network.latency_us * 1e-6 - latency_s) / self.ranks_per_node
            seconds_per_byte = max(seconds_per_byte, 1 / self.network.bytes_per_s)
        return Link(latency_s=latency_s, seconds_per_byte=seconds_per_byte)


def _links_over(interconnect: Interconnect, *, num_senders: int = 1) -> Links:
    """Links of all collectives over an interconnect that ``num_senders`` ranks share."""
    seconds_per_byte = num_senders / interconnect.bytes_per_s
    link = Link(latency_s=interconnect.latency_us * 1e-6, seconds_per_byte=seconds_per_byte)
    return Links(all_gather=link, reduce_scatter=link, all_reduce=_both_ways(link))


def _both_ways(link: Link) -> Link:
    """Link of all-reduces: each ring step there and back."""
    return replace(link, latency_s=2 * link.latency_s, seconds_per_byte=2 * link.seconds_per_byte)


def _device(name: str) -> tuple[Catalog, Device]:
    if not name.endswith(".toml"):
        catalog = read_catalog()
        return catalog, catalog.device(name)
    catalog, known = read_catalog(name), read_catalog()
    users = {each: device for each, device in catalog.devices.items() if known.devices.get(each) != device}
    if len(users) != 1:
        got = ", ".join(users) or "none"
        raise ConfigurationError(f"Expected one device in file {name!r}, got {got}. Give it one table [devices.NAME].")
    (device,) = users.values()
    return catalog, device
