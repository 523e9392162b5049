"""Peak of live bytes in one optimizer step under FSDP1, in closed form, as a function of the modes.

With the units in the order in which forward leaves them, x_u = 1 where unit u is kept gathered (DP), P_u its gathered
bytes, and floor_k the largest moment of an all-ZDP step at which the first k units are freed (`moments`):

    peak(x) = max_k ( floor_k + sum over the first k units of x_u P_u )

"At most the limit" is therefore a family of knapsack constraints, one per k, each on a prefix of the next one's units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost.cost import Workload
from lightning_osdp.cost.layout import layout
from lightning_osdp.cost.moments import Moment, largest_moments
from lightning_osdp.cost.schedule import leaving_order

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

    @classmethod
    def of(cls, moment: Moment, *, kept_bytes: float = 0.0) -> PeakMemory:
        """The peak at this moment, with so many bytes of gathered parameters besides; whole bytes, rounded up."""
        parts = {**moment.parts, "gathered parameters": moment.parts["gathered parameters"] + kept_bytes}
        return cls(
            peak_bytes=math.ceil(moment.num_bytes + kept_bytes - ROUNDING_BYTES),
            phase=moment.phase,
            operator=moment.operator,
            parts={part: round(num_bytes) for part, num_bytes in parts.items() if round(num_bytes)},
        )


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
        return PeakMemory.of(self.moments[k], kept_bytes=kept[k])


def step_memory(
    profile: ModelProfile,
    units: Sequence[UnitProfile],
    *,
    world_size: int,
    workload: Workload,
    backward_prefetch: str = "pre",
    forward_prefetch: bool = False,
    reduce_scatter_copies: bool = True,
) -> StepMemory:
    """Peak of one optimizer step on one rank, for any choice of modes.

    Args:
        profile: the model.
        units: partition of its operators.
        world_size: N. With one rank FSDP1 does not shard, and nothing is gathered.
        workload: micro-batch size and number of micro-batches; gradients are reduced in each.
        backward_prefetch: FSDP1's ``BACKWARD_PRE`` ("pre"), ``BACKWARD_POST`` ("post") or None ("none").
        forward_prefetch: FSDP1's option of the same name.
        reduce_scatter_copies: whether the backend copies what it reduces, as gloo does.
    """
    order, sizes = leaving_order(units), layout(tuple(units), profile.optimizer, world_size).units
    return StepMemory(
        order=order,
        gathered_bytes=tuple(sizes[unit].gathered if world_size > 1 else 0.0 for unit in order),
        moments=largest_moments(
            profile,
            units,
            world_size=world_size,
            workload=workload,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            reduce_scatter_copies=reduce_scatter_copies,
        ),
    )
