"""Configurations that people choose by hand, as plans are judged: a unit for each block, all treated alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from lightning_osdp.core.axes import DP, HDP, HSDP, KEEP, LEVELS, ZDP, modes_of, values_of
from lightning_osdp.core.batch_policy import MOST_SAMPLES, BatchPolicy, largest_fitting
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.step import Workload
from lightning_osdp.core.units import partition
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.assign import Setting, assignment_of, block_units
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.scheduler.planned import plan_of

BY_HAND = {"FULL_SHARD": ZDP, "SHARD_GRAD_OP": DP, "HYBRID_SHARD": HSDP, "HYBRID_SHARD_ZERO2": HDP}
"""Names of ``FullyShardedDataParallel`` -> the mode that all units have."""
_WAYS = {
    "keep": "",
    "recompute": ", checkpointing",
    "offload": ", offloading activations",
    "recompute_offload": ", checkpointing, offloading inputs",
    **{value: f", selective checkpointing {number}" for number, value in enumerate(LEVELS, start=1)},
}
"""Value of ``saves`` of all blocks -> how a name then goes on."""
_ENGINE = FSDP2(asynchronous_unshard=False)
"""``fully_shard`` as it is by default: it prefetches in backward."""


@dataclass(frozen=True, kw_only=True)
class HandMade:
    """A configuration at its best micro-batch, or at the smallest where none fits."""

    name: str
    micro_batch_size: int
    num_micro_batches: int
    step_time_s: float
    samples_per_s: float
    """Samples of all ranks."""
    peak_bytes: int
    fits: bool
    _make_plan: Callable[[], Plan] = field(repr=False, compare=False)

    @property
    def numbers(self) -> dict[str, Any]:
        """Fields of the configuration by name."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @property
    def plan(self) -> Plan:
        """The plan that it is: nothing was chosen of it but the micro-batch."""
        return self._make_plan()


def made_by_hand(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    memory_limit_bytes: int,
    policy: BatchPolicy,
    names: Collection[str] | None = None,
    activations: Collection[str] = ("keep", "recompute"),
) -> list[HandMade]:
    """``fully_shard`` with a unit for each block, resharded after forward or not, with or without checkpointing.

    All are sharded over all ranks, or over those of each node where there are several.

    Gradients are reduced in every micro-batch, or in the last one (``no_sync``), whichever is faster and fits.

    Args:
        profile: of the model; blocks are those that it has.
        cluster: ranks and links.
        memory_limit_bytes: most bytes of live tensors on one rank.
        policy: micro-batches that may be chosen.
        names: strategies of `BY_HAND`; None: those that differ on this cluster.
        activations: what all blocks may do with what they save, as far as it was profiled.

    Returns:
        The fastest that fits first, and those that do not fit last.

    Raises:
        ConfigurationError: there is no such strategy, or it is for several nodes.
    """
    by_block = in_blocks(profile, cluster)
    offered = [name for name, mode in BY_HAND.items() if cluster.has_nodes or not mode.needs_nodes]
    for name in names or ():
        if name not in offered:
            nodes = "" if name not in BY_HAND else " on one node, or on nodes of one rank"
            raise ConfigurationError(f"Expected one of {', '.join(offered)}, got {name!r}{nodes}.")
    found = []
    for name, choice in product(offered if names is None else names, values_of(activations)):
        blocks = {block.name: choice for block in profile.blocks if choice in block.segments}
        if choice == KEEP or blocks:
            setting = replace(by_block, modes=modes_of([BY_HAND[name].name], ("every", "last"))).with_blocks(blocks)
            found.append(_best(name + _WAYS[choice], setting, memory_limit_bytes, policy))
    return sorted(found, key=lambda each: (not each.fits, -each.samples_per_s if each.fits else each.peak_bytes))


def in_blocks(profile: ModelProfile, cluster: Cluster) -> Setting:
    """A step of one sample with a unit for each block, and everything else in the root, where that may be."""
    profile = SearchSpace().of(profile)  # weights move
    setting = Setting(
        profile=profile,
        units=partition(profile),
        cluster=cluster,
        workload=Workload(micro_batch_size=1),
        engine=_ENGINE,
    )
    *_, by_block = setting, *block_units(setting)
    return by_block


def _best(name: str, setting: Setting, memory_limit_bytes: int, policy: BatchPolicy) -> HandMade:
    """Every duration is affine in the samples: where any number may be chosen, the largest that fits is best."""

    def at(size: int) -> Setting:
        return replace(setting, workload=policy.workload(size))

    def fits(size: int) -> bool:
        costs = at(size).costs
        return any(costs.exact_peak_bytes(modes) <= memory_limit_bytes for modes in costs.uniform_modes())

    most = policy.max_micro_batch_size or MOST_SAMPLES
    sizes = policy.micro_batch_sizes or (max(1, largest_fitting(fits, most)),)
    every = [each for size in sizes for each in _with_and_without_no_sync(name, at(size), memory_limit_bytes)]
    fitting = [each for each in every if each.fits]
    if fitting:
        return max(fitting, key=lambda each: each.samples_per_s)
    return min(every, key=lambda each: each.peak_bytes)


def _with_and_without_no_sync(name: str, setting: Setting, memory_limit_bytes: int) -> Iterator[HandMade]:
    costs, workload = setting.costs, setting.workload
    for modes in costs.uniform_modes():
        found = assignment_of(setting, modes, bound_s=0.0)
        names = dict.fromkeys(mode.name for mode in modes[1:] or modes)
        space = SearchSpace(modes=tuple(names), slices=(1,), activations=(KEEP,))
        yield HandMade(
            name=name,
            micro_batch_size=workload.micro_batch_size,
            num_micro_batches=workload.num_micro_batches,
            step_time_s=found.step_time_s,
            samples_per_s=workload.num_samples * setting.cluster.world_size / found.step_time_s,
            peak_bytes=found.peak.peak_bytes,
            fits=found.peak.peak_bytes <= memory_limit_bytes,
            _make_plan=partial(plan_of, found, memory_limit_bytes=memory_limit_bytes, space=space),
        )
