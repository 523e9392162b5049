"""What people choose by hand, as plans are judged: a unit for each block, all of them treated alike."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from lightning_osdp.assign import Modes, Setting, block_units
from lightning_osdp.core.batch_policy import MOST_SAMPLES, BatchPolicy
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.modes import DP, ZDP, ShardingMode
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.step import Workload
from lightning_osdp.core.units import partition
from lightning_osdp.engine import FSDP2

_NAMES = {ZDP: "FULL_SHARD", DP: "SHARD_GRAD_OP"}
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

    Gradients are reduced in every micro-batch, or in the last one (``no_sync``), whichever is faster and fits.

    Args:
        profile: of the model; blocks are those that it has.
        cluster: ranks and links.
        memory_limit_bytes: most bytes of live tensors on one rank.
        policy: micro-batches that may be chosen.

    Returns:
        The fastest that fits first, and those that do not fit last.
    """
    found = []
    may_recompute = any("recompute" in block.segments for block in profile.blocks)
    for mode, recomputes in product((ZDP, DP), (False, True) if may_recompute else (False,)):
        configuration = _Configuration(profile, cluster, mode, recomputes=recomputes)
        found.append(configuration.best(memory_limit_bytes, policy))
    return sorted(found, key=lambda each: (not each.fits, -each.samples_per_s if each.fits else each.peak_bytes))


class _Configuration:
    """All units in one mode, and all blocks keep what they save or recompute it."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, mode: ShardingMode, *, recomputes: bool) -> None:
        self._mode = mode
        self._name = _NAMES[mode] + (", checkpointing" if recomputes else "")
        setting = Setting(
            profile=profile,
            units=partition(profile),
            cluster=cluster,
            workload=Workload(micro_batch_size=1),
            engine=_ENGINE,
        )
        # with everything else in the root, as users of fully_shard have it, where that may be
        *_, setting = setting, *block_units(setting)
        if recomputes:
            blocks = {block.name: "recompute" for block in profile.blocks if "recompute" in block.segments}
            setting = setting.with_blocks(blocks)
        self._setting = setting

    def best(self, memory_limit_bytes: int, policy: BatchPolicy) -> HandMade:
        """Every duration is affine in the samples: where any number may be chosen, the largest that fits is best."""
        sizes = policy.micro_batch_sizes or (self._largest(memory_limit_bytes, policy),)
        tried = [each for size in sizes for each in self._at(policy.workload(max(1, size)), memory_limit_bytes)]
        fitting = [each for each in tried if each.fits]
        if fitting:
            return max(fitting, key=lambda each: each.samples_per_s)
        return min(tried, key=lambda each: each.peak_bytes)

    def _at(self, workload: Workload, memory_limit_bytes: int) -> Iterator[HandMade]:
        setting = replace(self._setting, workload=workload)
        for modes in dict.fromkeys((self._modes(setting, "every"), self._modes(setting, "last"))):
            step_time_s = setting.costs.step_time_s(modes)
            peak_bytes = setting.costs.exact_peak(modes).peak_bytes
            yield HandMade(
                name=self._name,
                micro_batch_size=workload.micro_batch_size,
                num_micro_batches=workload.num_micro_batches,
                step_time_s=step_time_s,
                samples_per_s=workload.num_samples * setting.cluster.world_size / step_time_s,
                peak_bytes=peak_bytes,
                fits=peak_bytes <= memory_limit_bytes,
            )

    def _modes(self, setting: Setting, sync: str) -> Modes:
        accumulates = setting.workload.num_micro_batches > 1 and setting.cluster.world_size > 1
        last = replace(self._mode, sync=sync)
        return tuple(
            DP if unit.is_root else last if accumulates and setting.engine.may_wait(unit) else self._mode
            for unit in setting.units
        )

    def _largest(self, memory_limit_bytes: int, policy: BatchPolicy) -> int:
        """Largest micro-batch that fits; 0 if none does."""
        most = policy.max_micro_batch_size or MOST_SAMPLES

        def peak_bytes(size: int) -> int:
            setting = replace(self._setting, workload=policy.workload(size))
            return setting.costs.exact_peak(self._modes(setting, "every")).peak_bytes

        beyond = 1
        while beyond <= most and peak_bytes(beyond) <= memory_limit_bytes:
            beyond *= 2
        fits = beyond // 2
        return fits + bisect_right(range(fits + 1, min(beyond, most + 1)), memory_limit_bytes, key=peak_bytes)
