"""What to say where no plan fits: the limit, what is needed at least, by what, and what would help."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lightning_osdp.assign import Setting
from lightning_osdp.core.byte_size import format_at_least, format_bytes
from lightning_osdp.cost import PeakMemory
from lightning_osdp.scheduler.sweep import Sweep


def why_infeasible(sweep: Sweep, micro_batch_size: int, limit_bytes: int) -> str:
    """The text of `InfeasibleError`: the limit, the least bytes of any plan, the largest contributors, a remedy."""
    setting = sweep.smallest(micro_batch_size)
    peak = setting.peak(setting.least_memory_modes)
    workload, ranks = setting.workload, setting.cluster.world_size
    samples = workload.micro_batch_size
    sizes = {
        unit.name or "the root unit": unit.gathered_bytes
        + (unit.parameter_bytes + unit.trainable_bytes + unit.optimizer_bytes) / ranks
        + unit.saved_bytes.at(samples)
        for unit in setting.units
    }
    largest = sorted(sizes.items(), key=lambda item: item[1], reverse=True)[:3]
    listed = ", ".join(f"{name} ({format_bytes(num_bytes)})" for name, num_bytes in largest)
    parts = ", ".join(f"{part} {format_bytes(num_bytes)}" for part, num_bytes in peak.parts.items())
    where = f"in {peak.phase}" + (f" at {peak.operator!r}" if peak.operator else "")
    fits = sweep.largest(samples - 1)
    if fits:
        remedy = f"a micro-batch of {fits} fits: OSDPStrategy(batch_size={fits}), or batch_size='scale'"
    else:
        remedy = f"raise memory_limit to {format_at_least(peak.peak_bytes)!r}" + _more_ranks(setting, limit_bytes)
    saving_less = _saving_less(setting, peak, sweep.competition.activations)
    return (
        f"No plan fits: the limit is {format_bytes(limit_bytes)} per rank, and a micro-batch of {samples} on {ranks}"
        f" {'rank' if ranks == 1 else 'ranks'} needs at least {format_bytes(peak.peak_bytes)} ({where}: {parts})."
        f" Largest contributors: {listed}. Nearest remedy: {remedy}.{saving_less}"
        + "".join(f" Note: {note}." for note in setting.profile.notes)
    )


def _saving_less(setting: Setting, peak: PeakMemory, offered: Sequence[str]) -> str:
    """What else would help where most of the peak is saved for backward; nothing where it is not."""
    activations = peak.parts.get("activations", 0) + peak.parts.get("workspace", 0)
    if activations <= peak.peak_bytes / 2:
        return ""
    if not setting.unchanged.blocks and "recompute" in offered:
        how = "name modules that may recompute them: activation_checkpointing_policy={Block}"
    else:
        more = [choice for choice in ("recompute", "offload") if choice not in offered]
        if not more:
            return " Activations dominate."
        how = f"have blocks {' or '.join(more)} them: SearchSpace(activations={(*offered, *more)})"
    return f" Activations dominate; {how}."


def _more_ranks(setting: Setting, limit_bytes: int) -> str:
    """The first doubling of the ranks at which one and the same micro-batch per rank fits; nothing if none does."""
    for doubling in range(1, 11):
        ranks = setting.cluster.world_size * 2**doubling
        wider = dataclasses.replace(setting, cluster=dataclasses.replace(setting.cluster, world_size=ranks))
        if wider.peak(wider.least_memory_modes).peak_bytes <= limit_bytes:
            return f", or use {ranks} ranks"
    return ""
