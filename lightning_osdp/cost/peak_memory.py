"""Peak of live bytes in one optimizer step under FSDP1, in closed form, as a function of the modes.

With the units in the order in which forward leaves them, x_u = 1 where unit u is kept gathered (DP), P_u its gathered
bytes, and floor_k the largest moment of an all-ZDP step at which the first k units are freed (`moments`):

    peak(x) = max_k ( floor_k + sum over the first k units of x_u P_u )

"At most the limit" is therefore a family of knapsack constraints, one per k, each on a prefix of the next one's units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost.cost import Workload
from lightning_osdp.cost.moments import Moment, largest_moments, leaving_order, successive_moments

ROUNDING_BYTES = 1e-3
"""What the rounding of sums may add to a peak, which is else rounded up to whole bytes."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The largest phase of a step."""

    peak_bytes: int
    phase: str
    """``forward``, ``backward``, ``reduce-scatter`` or ``optimizer step``."""
    operator: str
    """Operator that runs at the peak; the empty string in the loss and in the optimizer step."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """What the peak consists of, in bytes."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The peak of one step for any choice of modes."""

    order: tuple[int, ...]
    """Units other than the root, as positions among all units, in the order in which forward leaves them."""
    gathered_bytes: tuple[float, ...]
    """P of each unit in that order: what it takes to keep it while ZDP would free it."""
    moments: Mapping[int, Moment]
    """k -> the largest moment at which exactly the first k of them are freed; none where nothing happens then."""

    def kept_bytes(self, modes: Sequence[ShardingMode]) -> list[float]:
        """For k = 0, 1, ...: bytes that the first k units keep with these modes, one per unit."""
        each = zip(self.order, self.gathered_bytes, strict=True)
        return [0.0, *accumulate(num_bytes if modes[unit].resident else 0.0 for unit, num_bytes in each)]

    def room_bytes(self, limit_bytes: int) -> list[float]:
        """For k = 0, 1, ...: bytes that the first k units may keep; never falling with k, for their sums never do.

        Modes fit where ``kept_bytes(modes)[k] <= room_bytes(limit_bytes)[k]`` for every k.
        """
        rooms = {k: limit_bytes + ROUNDING_BYTES - moment.num_bytes for k, moment in self.moments.items()}
        falling = [rooms.get(k, math.inf) for k in range(len(self.order), -1, -1)]
        return list(accumulate(falling, min))[::-1]

    def peak(self, modes: Sequence[ShardingMode]) -> PeakMemory:
        """The largest moment with these modes, one per unit."""
        kept = self.kept_bytes(modes)
        k = max(self.moments, key=lambda k: self.moments[k].num_bytes + kept[k])
        moment = self.moments[k]
        parts = {**moment.parts, "gathered parameters": moment.parts["gathered parameters"] + kept[k]}
        return PeakMemory(
            peak_bytes=math.ceil(moment.num_bytes + kept[k] - ROUNDING_BYTES),
            phase=moment.phase,
            operator=moment.operator,
            parts={part: round(num_bytes) for part, num_bytes in parts.items() if round(num_bytes)},
        )


def step_memory(
    profile: ModelProfile,
    units: Sequence[UnitProfile],
    *,
    world_size: int,
    workload: Workload,
    backward_prefetch: str = "pre",
    forward_prefetch: bool = False,
) -> StepMemory:
    """Peak of one optimizer step on one rank, for any choice of modes.

    Args:
        profile: the model.
        units: partition of its operators.
        world_size: N. With one rank FSDP1 does not shard, and nothing is gathered.
        workload: micro-batch size and number of micro-batches; gradients are reduced in each.
        backward_prefetch: FSDP1's ``BACKWARD_PRE`` ("pre"), ``BACKWARD_POST`` ("post") or None ("none").
        forward_prefetch: FSDP1's option of the same name.
    """
    order = leaving_order(units)
    return StepMemory(
        order=order,
        gathered_bytes=tuple(float(units[unit].gathered_bytes) if world_size > 1 else 0.0 for unit in order),
        moments=largest_moments(
            profile,
            units,
            world_size=world_size,
            workload=workload,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
        ),
    )


def peak_memory(
    profile: ModelProfile,
    units: Sequence[UnitProfile],
    modes: Sequence[ShardingMode],
    *,
    world_size: int,
    workload: Workload,
    backward_prefetch: str = "pre",
    forward_prefetch: bool = False,
) -> PeakMemory:
    """Largest number of live bytes on one rank in one optimizer step, with one mode per unit.

    The other arguments are those of `step_memory`.
    """
    memory = step_memory(
        profile,
        units,
        world_size=world_size,
        workload=workload,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
    )
    return memory.peak(modes)


def memory_over_step(
    profile: ModelProfile,
    units: Sequence[UnitProfile],
    modes: Sequence[ShardingMode],
    *,
    world_size: int,
    workload: Workload,
    backward_prefetch: str = "pre",
    forward_prefetch: bool = False,
) -> tuple[Moment, ...]:
    """All moments of one optimizer step in the order in which they come; the largest of them is `peak_memory`.

    The arguments are those of `peak_memory`.
    """
    order = leaving_order(units)
    # nothing is gathered on one rank, so nothing is kept
    kept = [units[unit].gathered_bytes if world_size > 1 and modes[unit].resident else 0.0 for unit in order]
    kept_bytes = [0.0, *accumulate(kept)]
    moments = successive_moments(
        profile,
        units,
        world_size=world_size,
        workload=workload,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
    )
    return tuple(_with_kept(moment, kept_bytes[k]) for k, moment in moments)


def _with_kept(moment: Moment, num_bytes: float) -> Moment:
    parts = {**moment.parts, "gathered parameters": moment.parts["gathered parameters"] + num_bytes}
    return replace(moment, num_bytes=moment.num_bytes + num_bytes, parts=parts)


def largest_transient_bytes(
    profile: ModelProfile, units: Sequence[UnitProfile], *, world_size: int, workload: Workload
) -> float:
    """The search's additive budget leaves room for this: ``max_i (P_i + P_(i-1) + 2 S_i)`` plus the largest workspace.

    It holds for every choice of modes, where the exact peak depends on all of them.
    """
    workspace = max((operator.backward_workspace_bytes_per_sample for operator in profile), default=0.0)
    largest, previous = 0.0, 0.0
    for unit in units:
        gathered = float(unit.gathered_bytes) if world_size > 1 else 0.0
        largest = max(largest, gathered + previous + 2 * unit.gradient_bytes)
        previous = gathered
    return largest + workspace * workload.micro_batch_size
