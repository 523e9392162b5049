"""Correction of seconds that were measured apart, of computing and of links, by those of whole steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.profile import BlockProfile, ModelProfile, Segment
from lightning_osdp.errors import ConfigurationError

LINKS = ("all", "node")
"""Links of collectives: over all ranks, and over those of a node."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Factors for seconds of profile and cluster, by which the steps of plans are predicted best; bytes stay.

    Raises:
        ConfigurationError: a factor is not positive, or there is no such link.
    """

    computing: float = 1.0
    """Factor for all seconds of a rank but those of collectives: operators, optimizer, the runtime's work for units."""
    links: Mapping[str, float] = field(default_factory=dict)
    """Factors for seconds of collectives, over ``all`` ranks and over those of a ``node``; the former is that of both
    where the latter is left out."""
    error: float = 0.0
    """Root mean square of what predictions are off by with these factors, as fractions of measured seconds."""
    error_before: float = 0.0
    """Root mean square likewise without these factors."""
    num_plans: int = 0
    """Plans whose steps were measured for it; 0: nothing is corrected."""

    def __post_init__(self) -> None:
        if not all(factor > 0 for factor in (self.computing, *self.links.values())) or not {*self.links} <= {*LINKS}:
            raise ConfigurationError(
                f"Expected factors above 0, and those of links by {LINKS}, got {self!r}. Leave out what stays as it is."
            )

    def factor(self, link: str) -> float:
        """Factor for the seconds of collectives of a link."""
        return self.links.get(link, self.links.get("all", 1.0))

    def after(self, earlier: Correction) -> Correction:
        """Correction of what another one had corrected already, in one."""
        links = {link: self.factor(link) * earlier.factor(link) for link in {**earlier.links, **self.links}}
        return replace(self, computing=self.computing * earlier.computing, links=links)

    def of_cluster(self, cluster: Cluster) -> Cluster:
        """Cluster with corrected seconds of links and of the runtime."""
        over_all, times = self.factor("all"), self.computing
        return replace(
            cluster,
            all_gather=cluster.all_gather.taking(over_all),
            reduce_scatter=cluster.reduce_scatter.taking(over_all),
            all_reduce=cluster.all_reduce and cluster.all_reduce.taking(over_all),
            agreement=cluster.agreement and cluster.agreement.taking(over_all),
            between_nodes=cluster.between_nodes and cluster.between_nodes.taking(over_all),
            within_node=cluster.within_node and cluster.within_node.taking(self.factor("node")),
            unit_overhead={part: overhead.taking(times) for part, overhead in cluster.unit_overhead.items()},
            call_s=cluster.call_s * times,
            slice_s=cluster.slice_s * times,
            host_copy_s_per_byte=cluster.host_copy_s_per_byte * times,
        )

    def of_profile(self, profile: ModelProfile) -> ModelProfile:
        """Profile with corrected seconds."""
        times, optimizer = self.computing, profile.optimizer
        host_s = optimizer.host_s_per_element
        return replace(
            profile,
            segments=self._of_segments(profile.segments),
            blocks=tuple(map(self._of_block, profile.blocks)),
            optimizer=replace(
                optimizer,
                s_per_element=optimizer.s_per_element * times,
                host_s_per_element=None if host_s is None else host_s * times,
                fixed_s=optimizer.fixed_s * times,
            ),
        )

    def _of_segments(self, segments: Iterable[Segment]) -> tuple[Segment, ...]:
        times = self.computing
        return tuple(
            replace(each, forward_s=each.forward_s * times, backward_s=each.backward_s * times) for each in segments
        )

    def _of_block(self, block: BlockProfile) -> BlockProfile:
        levels = block.levels.items()
        return replace(
            block,
            segments={value: self._of_segments(own) for value, own in block.segments.items()},
            rerun_s=block.rerun_s * self.computing,
            levels={value: replace(level, rerun_s=level.rerun_s * self.computing) for value, level in levels},
        )
