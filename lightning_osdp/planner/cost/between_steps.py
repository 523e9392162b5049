"""Peaks outside the training step: while the model is evaluated, and while a checkpoint is saved.

Both happen between training steps, with parameter shards, optimizer state and buffers alive. [Empirical: derived from,
and within 0.5% of, counts of live storages on two gloo ranks in three precisions.]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.step import Step
from lightning_osdp.planner.engine import (
    DEFAULT,
    FSDP2,
    effects_of,
    evaluation_beside,
    moving_activations,
    num_shards,
)
from lightning_osdp.planner.engine.layout import Layout


def evaluation_peak(step: Step, modes: Sequence[Treatment], *, engine: FSDP2 = DEFAULT) -> float:
    """Most bytes alive on one rank while the model runs forward without gradients.

        base + [P of the root and of all DP units] + max_i ( [P of ZDP units that run] + e_i )

    less the shards that are views of resident units, and the buffers of all-gathers; or, of units that move
    activations, inputs and outputs of all ranks. Without a backward to free it, a DP unit stays gathered after its
    first forward, and of an hpZ unit a shard stays in each node. Resident units are gathered before all others, if they
    are not there yet. Lightning has zeroed the gradients. An evaluation batch has as many samples as a micro-batch of
    the training step, on which e_i is measured.
    """
    profile, units = step.profile, step.units
    micro_batch_size = step.workload.micro_batch_size
    layout = engine.layout_in(step, modes)
    effects = [effects_of(mode) for mode in modes]
    stays = [unit.is_root or each.is_kept for unit, each in zip(units, effects, strict=True)]
    running = [0.0] * len(profile.segments)
    gathering = [0.0] * len(profile.segments)
    for unit, size, is_kept, each in zip(units, layout.units, stays, effects, strict=True):
        for first, last in unit.calls if not each.is_passed_over else ():
            gathering[first] = max(gathering[first], size.sent_shard, size.buffer)
            for segment in range(first, last + 1) if not is_kept else ():
                running[segment] += size.gathered
    kept = sum(size.gathered for size, is_kept in zip(layout.units, stays, strict=True) if is_kept)
    resident = [size for size, each in zip(layout.units, effects, strict=True) if each.is_resident]
    kept -= sum(size.shared for size in resident)
    kept += sum(
        size.gathered / step.cluster.num_ranks(each.left_over)
        for size, each in zip(layout.units, effects, strict=True)
        if each.leaves_shard
    )
    for place, num_bytes in evaluation_beside(step, moving_activations(step, modes)).items():
        running[place] += num_bytes
    transient = (
        whole + max(segment.evaluation_bytes.at(micro_batch_size), cast)
        for segment, whole, cast in zip(profile.segments, running, gathering, strict=True)
    )
    buffers = (size.buffer for size, each in zip(layout.units, effects, strict=True) if not each.is_resident)
    lingering = engine.most_lingering * max(buffers, default=0.0)
    parameters = sorted((each for size in resident for each in size.parameters), reverse=True)
    there = accumulate((each.gathered - each.shared for each in parameters), initial=0.0)
    beside_buffer = [before + 2 * each.gathered for before, each in zip(there, parameters, strict=False)]
    states = _between_steps(step, layout) + profile.batch_bytes.at(micro_batch_size)
    return states + max([kept + lingering + max(transient), *beside_buffer])


def saving_peak(step: Step, modes: Sequence[Treatment], *, is_sharded: bool, engine: FSDP2 = DEFAULT) -> float:
    """Most bytes alive on rank 0 while a checkpoint of model and optimizer is made on the device; a bound.

    State dicts of the model and of its optimizer live together: of all parameters in a full checkpoint, of this rank's
    in a sharded one. Units are gathered one after the other, beside what an evaluation before has left gathered.
    """
    units, shards = step.units, num_shards(step, modes)
    layout = engine.layout_in(step, modes)
    states = sum(
        (unit.parameter_bytes + unit.optimizer_bytes) / (number if is_sharded else 1)
        for unit, number in zip(units, shards, strict=True)
    )
    # state dicts gather units in the dtype at rest
    own = [size.shard + size.host_shard for size in layout.units]
    gathered = [num_bytes * number if number > 1 else 0.0 for num_bytes, number in zip(own, shards, strict=True)]
    left = sum(
        num_bytes
        for unit, mode, num_bytes in zip(units, modes, gathered, strict=True)
        if unit.is_root or effects_of(mode).is_kept
    )
    one = max(map(sum, zip(gathered, own, strict=True)), default=0.0)
    return _between_steps(step, layout) + left + one + states


def _between_steps(step: Step, layout: Layout) -> float:
    always = step.profile.buffer_bytes + step.cluster.library_workspace_bytes
    return layout.shards + layout.optimizer_state + always
