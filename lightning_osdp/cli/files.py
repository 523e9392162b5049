"""What commands read: a plan, and the profile and the cluster that a fit has written beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.stored import CLUSTER_FILENAME, PROFILE_FILENAME
from lightning_osdp.errors import PlanFormatError


def read_profile(path: str | Path) -> ModelProfile:
    """The profile in a file; raises `PlanFormatError` if there is none, or its parts do not belong together."""
    profile = ModelProfile.load(path)
    wrong = next(_wrong(profile), None)
    if wrong is not None:
        raise PlanFormatError(f"Expected the parts of profile {str(path)!r} to belong together, got {wrong}.")
    return profile


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a file; raises `PlanFormatError` if there is none, or it has no ranks."""
    cluster = Cluster.load(path)
    if cluster.world_size < 1:
        raise PlanFormatError(f"Expected at least one rank in cluster {str(path)!r}, got {cluster.world_size}.")
    if cluster.node_size is not None and (cluster.node_size < 1 or cluster.world_size % cluster.node_size):
        raise PlanFormatError(
            f"Expected a node_size that divides the {cluster.world_size} ranks of cluster {str(path)!r}, got"
            f" {cluster.node_size}."
        )
    return cluster


def read_all(plan: str, profile: str | None, cluster: str | None) -> tuple[Plan, ModelProfile, Cluster]:
    """A plan, and what it was made of: by default what a fit has written beside the plan.

    Raises:
        PlanFormatError: one of them cannot be read.
        PlanMismatchError: they are of another model or another number of ranks.
    """
    folder = Path(plan).parent
    found = (
        Plan.load(plan),
        read_profile(profile or folder / PROFILE_FILENAME),
        read_cluster(cluster or folder / CLUSTER_FILENAME),
    )
    found[0].check_matches(found[1].fingerprint, world_size=found[2].world_size, node_size=found[2].node_size)
    return found


def are_beside(plan: str) -> bool:
    """Whether a fit has written what this plan was made of beside it; another run may have written over that."""
    profile, cluster = (Path(plan).parent / name for name in (PROFILE_FILENAME, CLUSTER_FILENAME))
    if not profile.exists() or not cluster.exists():
        return False
    found = Plan.load(plan)
    is_same_model = found.fingerprint == read_profile(profile).fingerprint
    return is_same_model and found.world_size == read_cluster(cluster).world_size


def _wrong(profile: ModelProfile) -> Iterator[str]:
    """What of a profile that somebody has edited does not belong together."""
    names = {operator.name for operator in profile}
    if not profile.segments or len(names) < len(profile.operators):
        yield "no segments, or an operator twice"
    yield from (f"a segment of {each.operator!r}" for each in profile.segments[:-1] if each.operator not in names)
    spans = [span for calls in profile.spans.values() for span in calls] + [block.span for block in profile.blocks]
    yield from (f"span {span}" for span in spans if not 0 <= span[0] <= span[1] < len(profile.segments))
    for block in profile.blocks:
        length = block.span[1] - block.span[0] + 1
        yield from (f"block {block.name!r}" for segments in block.segments.values() if len(segments) != length)
