"""Text for where no plan fits: the limit, the bytes needed at least, by what, and what would help."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product

from lightning_osdp.core.axes import AXES, Treatment, on_device
from lightning_osdp.core.batch_policy import largest_fitting
from lightning_osdp.core.text.byte_size import format_at_least, format_bytes
from lightning_osdp.planner.assign import Modes, Setting
from lightning_osdp.planner.cost import PeakMemory, Workload
from lightning_osdp.planner.scheduler.sweep import Sweep

_WORTH_TELLING = 0.9
"""Share of the bytes below which it is told what would need fewer."""

_MOST_MICRO_BATCHES = 2**16
"""Micro-batches of a step that is proposed, at most."""


def why_infeasible(sweep: Sweep, micro_batch_size: int, host_limit_bytes: int | None) -> str:
    """The text of `InfeasibleError`: the limit, the least bytes of any plan, the largest contributors, a remedy."""
    setting, memory_limit_bytes = sweep.smallest(micro_batch_size), sweep.competition.memory_limit_bytes
    least = setting.costs.least_memory_modes
    exact = setting.costs.exact_peak(least)
    # where operators are split, nothing is looked for beyond the closed form
    peak = exact if exact.peak_bytes > memory_limit_bytes else setting.costs.peak(least)
    ranks = setting.cluster.world_size
    sizes = {
        unit.name or "the root unit": unit.gathered_bytes
        + (unit.parameter_bytes + unit.trainable_bytes + unit.optimizer_bytes) / ranks
        + unit.saved_bytes.at(micro_batch_size)
        for unit in setting.units
    }
    largest = sorted(sizes.items(), key=lambda item: item[1], reverse=True)[:3]
    listed = ", ".join(f"{name} ({format_bytes(num_bytes)})" for name, num_bytes in largest)
    parts = ", ".join(f"{part} {format_bytes(num_bytes)}" for part, num_bytes in peak.parts.items())
    where = f"in {peak.phase}" + (f" at {peak.operator!r}" if peak.operator else "")
    divided = _divided(sweep, setting.workload)
    fits = None if divided else largest_fitting(sweep.fits, micro_batch_size - 1)
    if divided:
        remedy = (
            f"micro-batches of {divided.micro_batch_size} fit: OSDPStrategy(batch_size={divided.micro_batch_size}) with"
            f" Trainer(accumulate_grad_batches={divided.num_micro_batches}) keeps the global batch"
        )
    elif fits:
        remedy = (
            f"a micro-batch of {fits} fits, which changes the global batch: OSDPStrategy(batch_size={fits}),"
            " or batch_size='scale'"
        )
    else:
        more_ranks = _more_ranks(setting, memory_limit_bytes)
        remedy = f"raise memory_limit to {format_at_least(peak.peak_bytes)!r}{more_ranks}"
    return (
        f"No plan fits: the limit is {format_bytes(memory_limit_bytes)} per rank, and a micro-batch of"
        f" {micro_batch_size} on {ranks} {'rank' if ranks == 1 else 'ranks'} needs at least"
        f" {format_bytes(peak.peak_bytes)} ({where}: {parts}). Largest contributors: {listed}."
        f" Nearest remedy: {remedy}.{_saving_less(setting, peak, sweep)}"
        + _on_host(setting, peak, memory_limit_bytes, host_limit_bytes)
        + "".join(f" Note: {note}." for note in setting.profile.notes)
    )


def why_host_lacks(sweep: Sweep, micro_batch_size: int, host_limit_bytes: int, needed_bytes: int) -> str:
    """The text of `InfeasibleError` where plans fit on the device only, the fastest of which needs so much of the host.

    It states the least that was found.
    """
    setting, limit_bytes = sweep.smallest(micro_batch_size), sweep.competition.memory_limit_bytes
    space = sweep.competition.space
    modes = _fewest_on_host(setting, limit_bytes) if "device" in {*space.states} & {*space.shards} else None
    least_bytes = 0 if modes is None else setting.costs.host_bytes(modes)
    if host_limit_bytes < least_bytes < needed_bytes:
        needed_bytes = least_bytes
    return (
        f"No plan fits: the limit is {format_bytes(limit_bytes)} per rank, for which a rank needs"
        f" {format_bytes(needed_bytes)} of its host's memory, and may take {format_bytes(host_limit_bytes)}:"
        f" {format_bytes(needed_bytes - host_limit_bytes)} are lacking. Use smaller micro-batches or more ranks, raise"
        " memory_limit, or free memory of the host and raise host_memory_limit."
    )


def _fewest_on_host(setting: Setting, memory_limit_bytes: int) -> Modes | None:
    """Modes with the least memory, but with states and shards on the host of as few units as fit, the largest first.

    Units that are trained have their states there alone, or else their shards, too. None where not even those of all
    units there do.
    """
    costs, least = setting.costs, setting.costs.least_memory_modes
    states_alone = tuple(mode.but(shard="device") if "states" in mode else mode for mode in least)
    hosted = sorted(costs.hosted, key=lambda unit: -setting.units[unit].parameter_bytes)

    def of_first(number: int, there: Modes) -> Modes:
        left = {*hosted[number:]}
        return tuple(on_device(mode) if unit in left else mode for unit, mode in enumerate(there))

    def fits(there: Modes, number: int) -> bool:
        return costs.exact_peak_bytes(of_first(number, there)) <= memory_limit_bytes

    for there in (states_alone, least):
        number = bisect_left(range(len(hosted) + 1), True, key=partial(fits, there))
        if number <= len(hosted):
            return of_first(number, there)
    return None


def _divided(sweep: Sweep, workload: Workload) -> Workload | None:
    """Workload with the same samples of a step in the largest micro-batches that fit; None if none do."""
    num_samples = workload.num_samples
    found = (
        Workload(micro_batch_size=num_samples // number, num_micro_batches=number)
        for number in range(workload.num_micro_batches + 1, min(num_samples, _MOST_MICRO_BATCHES) + 1)
        if num_samples % number == 0
    )
    return next((each for each in found if sweep.fits(each.micro_batch_size, each.num_micro_batches)), None)


def _saving_less(setting: Setting, peak: PeakMemory, sweep: Sweep) -> str:
    """Sentence on what helps where most of the peak is saved for backward; empty where it is not."""
    offered, has_blocks = sweep.competition.space.activations, bool(setting.unchanged.blocks)
    activations = peak.parts.get("activations", 0)
    if has_blocks:  # tensors that a block recomputes, or takes back, are workspace of its backward
        activations += peak.parts.get("workspace", 0)
    if activations <= peak.peak_bytes / 2:
        return ""
    if not has_blocks and "recompute" in offered:
        return " Activations dominate; name modules that may recompute them: activation_checkpointing_policy={Block}."
    more = [choice for choice in ("recompute", "offload") if choice not in offered]
    how = f"have blocks {' or '.join(more)} them: SearchSpace(activations={(*offered, *more)})"
    if not any(choice in block.segments for block in setting.unchanged.blocks for choice in more):  # not profiled
        return f" Activations dominate; {how}." if more else " Activations dominate."
    needed_bytes = sweep.least_bytes(setting.workload.micro_batch_size, (*offered, *more))
    if needed_bytes >= peak.peak_bytes:
        return " Activations dominate."
    return f" Activations dominate; {how}, with which {format_bytes(needed_bytes)} are needed."


def _on_host(setting: Setting, peak: PeakMemory, memory_limit_bytes: int, host_limit_bytes: int | None) -> str:
    """Sentence on what more on the host would do; empty where all may be there, or it would hardly matter."""
    offered = _counts_on_host(setting.modes)
    missing = [axis for axis in _PLACES if not offered[axis]]
    if setting.is_paper or not missing:
        return ""
    optimizer, profile = setting.profile.optimizer, setting.profile
    is_timed = optimizer.host_s_per_element is not None
    if not is_timed:
        profile = dataclasses.replace(profile, optimizer=dataclasses.replace(optimizer, host_s_per_element=0.0))
    ways = [dict(zip(missing, each, strict=True)) for each in product(*(AXES[axis].values for axis in missing))]
    modes = tuple(mode.but(**way) for mode in setting.modes for way in ways)
    offering = dataclasses.replace(setting, profile=profile, modes=modes)
    costs, fewest = offering.costs, _fewest_on_host(offering, memory_limit_bytes)
    if fewest is None:
        least = costs.least_memory_modes
        needed_bytes = costs.exact_peak_bytes(least)
        if needed_bytes > _WORTH_TELLING * peak.peak_bytes:
            return ""
        there = " and ".join(_PLACES[axis][0] for axis in _counts_on_host(least))
        return f" With {there} on the host {format_bytes(needed_bytes)} are needed:{_told(missing, least)}."
    numbers, of_all, needed_bytes = *map(_counts_on_host, (fewest, costs.hosted.values())), costs.host_bytes(fewest)
    if not numbers:  # it fits though no search has found it
        return ""
    which = " and ".join(f"the {_PLACES[axis][1]} of {numbers[axis]} of {of_all[axis]} units" for axis in numbers)
    which += " on the host"
    if host_limit_bytes is not None and needed_bytes > host_limit_bytes:
        return (
            f" With {which} it would fit, for which a rank needs {format_bytes(needed_bytes)} of the host's memory, and"
            f" may take {format_bytes(host_limit_bytes)}."
        )
    own_s, device_s = costs.step_time_s(fewest), costs.step_time_s(tuple(map(on_device, fewest)))
    is_timed = device_s > 0 and (is_timed or "states" not in numbers)
    told = f", {own_s / device_s:.2f}x slower" if is_timed else ""
    return f" It fits with {which}{told}:{_told(missing, fewest)}."


_PLACES = {"states": ("optimizer states", "states"), "shard": ("shards", "shards")}
"""Axis of what may be on the host -> its name, and the field of `SearchSpace`."""


def _counts_on_host(modes: Iterable[Treatment]) -> Counter[str]:
    """Number of units with these modes of which something is on the host, by axis; without axes of no unit."""
    return Counter(axis for axis, mode in product(_PLACES, modes) if mode[axis] == "host")


def _told(missing: Sequence[str], modes: Modes) -> str:
    """Search space that offers what is not offered yet and is on the host in these modes."""
    used = [axis for axis in missing if _counts_on_host(modes)[axis]]
    return f" SearchSpace({', '.join(f'{_PLACES[axis][1]}={AXES[axis].values[::-1]}' for axis in used)})"


def _more_ranks(setting: Setting, memory_limit_bytes: int) -> str:
    """The first doubling of the ranks at which one and the same micro-batch per rank fits; nothing if none does."""
    for doubling in range(1, 11):
        ranks = setting.cluster.world_size * 2**doubling
        wider = dataclasses.replace(setting, cluster=dataclasses.replace(setting.cluster, world_size=ranks))
        if wider.costs.memory.peak_bytes(wider.costs.least_memory_modes) <= memory_limit_bytes:
            return f", or use {ranks} ranks"
    return ""
