"""The transformers of `plans` with blocks that may do anything with what they save for backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.measures.search.plans import SAMPLES, PlanRow, cluster, row, setting, transformer
from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.axes import ACTIVATION_CHOICES, DP
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import BlockProfile, ModelProfile, Segment
from lightning_osdp.planner.assign import assign_modes, block_units
from lightning_osdp.planner.engine import with_activations
from lightning_osdp.planner.scheduler import make_plan

ADDITIVE = "modes and activations"
"""Name of the rows on whole blocks: a nested knapsack, where nothing overlaps."""
HOST_COPY_S_PER_BYTE = 1 / 25e9
"""Seconds per byte of a link of 16 PCIe 4.0 lanes."""
CHOICES = tuple(choice for choice in ACTIVATION_CHOICES if choice != "keep")


def transformer_of_blocks(num_blocks: int) -> ModelProfile:
    """Returns a decoder each block of which may recompute, offload, or both."""
    profile = transformer(num_blocks)
    return replace(profile, blocks=tuple(_block(profile, f"h.{index}") for index in range(num_blocks)))


def _block(profile: ModelProfile, name: str) -> BlockProfile:
    ((first, last),) = profile.spans[name]
    segments = profile.segments[first : last + 1]
    inputs, saved = segments[0].saved_bytes, sum((segment.saved_bytes for segment in segments), ZERO)
    return BlockProfile(
        name=name,
        span=(first, last),
        segments={choice: _saving_less(segments, choice) for choice in CHOICES},
        rerun_s=sum((segment.forward_s for segment in segments), ZERO),
        copied_bytes={"offload": saved, "recompute_offload": inputs},
    )


def _saving_less(segments: tuple[Segment, ...], choice: str) -> tuple[Segment, ...]:
    """Segments of a block that saves less, with the bytes that its backward holds of tensors that came back."""
    found: list[Segment] = []
    alive = ZERO
    for segment in segments:
        alive = alive + segment.saved_bytes if choice != "offload" else segment.saved_bytes
        stays = segment.saved_bytes if choice == "recompute" and not found else ZERO
        workspace = Affine(alive.fixed - stays.fixed, alive.per_sample - stays.per_sample)
        found.append(replace(segment, saved_bytes=stays, backward_workspace_bytes=workspace))
    return tuple(found)


def measure_block_plans(blocks: Sequence[int], shares: Sequence[float]) -> list[PlanRow]:
    """Returns rows in which everything is offered: modes and activations of whole blocks, and whole plans."""
    rows = []
    for overlaps, num_blocks in itertools.product((False, True), blocks):
        profile = transformer_of_blocks(num_blocks)
        limits = [_limit_bytes(profile, share) for share in shares]
        for name, solver in ((f"{ADDITIVE}, {num_blocks} blocks", _modes), (f"plan, {num_blocks} blocks, any", _plan)):
            solves = [solver(profile, limit, overlaps=overlaps) for limit in limits]
            rows.append(row(name, len(profile.operators), overlaps, solves))
    return rows


def _limit_bytes(profile: ModelProfile, share: float) -> int:
    """Bytes at a share of the way from the least that any plan takes to keeping everything."""
    everything = setting(profile, overlaps=False)
    less = with_activations(profile, {block.name: "recompute_offload" for block in profile.blocks})
    nothing = setting(less, overlaps=False)
    least = nothing.costs.peak(nothing.costs.least_memory_modes).peak_bytes
    most = everything.costs.peak((DP,) * len(everything.units)).peak_bytes
    return int(least + share * (most - least))


def _modes(profile: ModelProfile, limit_bytes: int, *, overlaps: bool) -> Callable[[], float]:
    ranks = _cluster(overlaps=overlaps)

    def solve() -> float:
        found = block_units(replace(setting(profile, overlaps=overlaps), cluster=ranks), ACTIVATION_CHOICES)[0]
        assigned = assign_modes(found, memory_limit_bytes=limit_bytes)
        assert assigned is not None
        return assigned.gap

    return solve


def _plan(profile: ModelProfile, limit_bytes: int, *, overlaps: bool) -> Callable[[], float]:
    ranks, space = _cluster(overlaps=overlaps), SearchSpace(activations=ACTIVATION_CHOICES)
    return lambda: (
        make_plan(profile, ranks, memory_limit_bytes=limit_bytes, micro_batch_size=SAMPLES, search_space=space).gap
    )


def _cluster(*, overlaps: bool) -> Cluster:
    return replace(cluster(overlaps=overlaps), host_copy_s_per_byte=HOST_COPY_S_PER_BYTE)
