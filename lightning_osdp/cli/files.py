"""Files of commands: a plan, with the profile and the cluster that a fit has written beside it, and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning_osdp.core.cluster import MOST_RANKS, Cluster
from lightning_osdp.core.plans.document import write_whole
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.stored import CLUSTER_FILENAME, PROFILE_FILENAME
from lightning_osdp.errors import ConfigurationError, PlanFormatError


def read_profile(path: str | Path) -> ModelProfile:
    """Profile in a file; raises `PlanFormatError` if there is none, or its parts do not belong together."""
    profile = ModelProfile.load(path)
    wrong = next(_wrong(profile), None)
    if wrong is not None:
        raise PlanFormatError(f"Expected the parts of profile {str(path)!r} to belong together, got {wrong}.")
    return profile


def read_cluster(path: str | Path) -> Cluster:
    """Cluster in a file; raises `PlanFormatError` if there is none, or it has no ranks."""
    cluster = Cluster.load(path)
    if not 1 <= cluster.world_size <= MOST_RANKS:
        raise PlanFormatError(
            f"Expected at least one rank in cluster {str(path)!r}, and at most 2^20, got {cluster.world_size}."
        )
    if cluster.node_size is not None and (cluster.node_size < 1 or cluster.world_size % cluster.node_size):
        raise PlanFormatError(
            f"Expected a node_size that divides the {cluster.world_size} ranks of cluster {str(path)!r}, got"
            f" {cluster.node_size}."
        )
    return cluster


def files_of(plan: str, profile: str | None, cluster: str | None) -> tuple[str, str, str]:
    """Paths of a plan, its profile and its cluster; by default a fit has written them beside the plan."""
    folder = Path(plan).parent
    return plan, profile or str(folder / PROFILE_FILENAME), cluster or str(folder / CLUSTER_FILENAME)


def read_all(plan: str, profile: str, cluster: str) -> tuple[Plan, ModelProfile, Cluster]:
    """Plan, profile and cluster in files.

    Raises:
        PlanFormatError: one of the files cannot be read.
        PlanMismatchError: profile or cluster is of another model or another number of ranks than the plan.
    """
    found = Plan.load(plan), read_profile(profile), read_cluster(cluster)
    found[0].check_matches(found[1].fingerprint, world_size=found[2].world_size, node_size=found[2].node_size)
    return found


def has_profile_beside(plan: str) -> bool:
    """Tells if the profile and the cluster of a plan are beside it; another run may have written over them."""
    _, profile, cluster = files_of(plan, None, None)
    if not Path(profile).exists() or not Path(cluster).exists():
        return False
    found = Plan.load(plan)
    is_same_model = found.fingerprint == read_profile(profile).fingerprint
    return is_same_model and found.world_size == read_cluster(cluster).world_size


def _wrong(profile: ModelProfile) -> Iterator[str]:
    """Parts of a profile that do not belong together, as after somebody has edited it."""
    names = {operator.name for operator in profile}
    if not profile.segments or len(names) < len(profile.operators):
        yield "no segments, or an operator twice"
    yield from (f"a segment of {each.operator!r}" for each in profile.segments[:-1] if each.operator not in names)
    spans = [span for calls in profile.spans.values() for span in calls] + [block.span for block in profile.blocks]
    yield from (f"span {span}" for span in spans if not 0 <= span[0] <= span[1] < len(profile.segments))
    for block in profile.blocks:
        length = block.span[1] - block.span[0] + 1
        yield from (f"block {block.name!r}" for segments in block.segments.values() if len(segments) != length)


def checked_output(path: str | Path, option: str, *, force: bool, inputs: Iterable[str | Path]) -> Path:
    """Path of an output, which is no input of the command, and at which no file is, or one that may be replaced.

    Raises:
        ConfigurationError: the path is not so; raised before anything is computed.
    """
    path = Path(path)
    try:
        found, is_folder = path.exists(), path.is_dir()
        is_input = found and any(path.samefile(each) for each in map(Path, inputs) if each.exists())
    except (OSError, ValueError) as error:  # a path that no file can have
        raise ConfigurationError(_cannot_write(path, option, error)) from error
    if is_input:
        raise ConfigurationError(f"Expected {option} to be no file that the command reads, got {str(path)!r}.")
    if is_folder:
        raise ConfigurationError(f"Expected a file for {option}, got the folder {str(path)!r}. Name a file in it.")
    if found and not force:
        raise ConfigurationError(
            f"Expected a new file for {option}, but {str(path)!r} is there. Name another one, or give --force."
        )
    return path


def write_output(text: str, path: Path, option: str) -> None:
    """Writes the file that an option asks for, whole or not at all."""
    try:
        write_whole(text, path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(_cannot_write(path, option, error)) from error


def _cannot_write(path: Path, option: str, error: Exception) -> str:
    return f"Expected a file that can be written for {option}, got {str(path)!r}: {error}."
