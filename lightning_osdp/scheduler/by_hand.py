"""What people choose by hand, as plans are judged: a unit for each block, all of them treated alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from lightning_osdp.assign import Setting, block_units
from lightning_osdp.core.batch_policy import MOST_SAMPLES, BatchPolicy, largest_fitting
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import DP, HDP, HSDP, ZDP, modes_of
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.step import Workload
from lightning_osdp.core.units import partition
from lightning_osdp.engine import FSDP2

_NAMES = {ZDP: "FULL_SHARD", DP: "SHARD_GRAD_OP", HSDP: "HYBRID_SHARD", HDP: "HYBRID_SHARD_ZERO2"}
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
    """Of all ranks."""
    peak_bytes: int
    fits: bool


def made_by_hand(
    profile: ModelProfile, cluster: Cluster, *, memory_limit_bytes: int, policy: BatchPolicy
) -> list[HandMade]:
    """``fully_shard`` with a unit for each block, resharded after forward or not, with or without checkpointing.

    All are sharded over all ranks, or over those of each node where there are several.

    Gradients are reduced in every micro-batch, or in the last one (``no_sync``), whichever is faster and fits.

    Args:
        profile: of the model; blocks are those that it has.
        cluster: ranks and links.
        memory_limit_bytes: most bytes of live tensors on one rank.
        policy: micro-batches that may be chosen.

    Returns:
        The fastest that fits first, and those that do not fit last.
    """
    by_block = in_blocks(profile, cluster)
    recomputed = {block.name: "recompute" for block in profile.blocks if "recompute" in block.segments}
    found = []
    offered = [mode for mode in _NAMES if cluster.has_nodes or not mode.needs_nodes]
    for mode, blocks in product(offered, ({}, recomputed) if recomputed else ({},)):
        setting = replace(by_block, modes=modes_of([mode.name], ("every", "last"))).with_blocks(blocks)
        name = _NAMES[mode] + (", checkpointing" if blocks else "")
        found.append(_best(name, setting, memory_limit_bytes, policy))
    return sorted(found, key=lambda each: (not each.fits, -each.samples_per_s if each.fits else each.peak_bytes))


def in_blocks(profile: ModelProfile, cluster: Cluster) -> Setting:
    """A step of one sample with a unit for each block, and everything else in the root, where that may be."""
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
        return any(costs.exact_peak(modes).peak_bytes <= memory_limit_bytes for modes in costs.alike())

    most = policy.max_micro_batch_size or MOST_SAMPLES
    sizes = policy.micro_batch_sizes or (max(1, largest_fitting(fits, most)),)
    every = [each for size in sizes for each in _with_and_without_no_sync(name, at(size), memory_limit_bytes)]
    fitting = [each for each in every if each.fits]
    if fitting:
        return max(fitting, key=lambda each: each.samples_per_s)
    return min(every, key=lambda each: each.peak_bytes)


def _with_and_without_no_sync(name: str, setting: Setting, memory_limit_bytes: int) -> Iterator[HandMade]:
    costs, workload = setting.costs, setting.workload
    for modes in costs.alike():
        step_time_s = costs.step_time_s(modes)
        peak_bytes = costs.exact_peak(modes).peak_bytes
        yield HandMade(
            name=name,
            micro_batch_size=workload.micro_batch_size,
            num_micro_batches=workload.num_micro_batches,
            step_time_s=step_time_s,
            samples_per_s=workload.num_samples * setting.cluster.world_size / step_time_s,
            peak_bytes=peak_bytes,
            fits=peak_bytes <= memory_limit_bytes,
        )
