"""Peak of live bytes in one optimizer step under FSDP1, in closed form: a running sum over forward and backward.

Notation: units u with P_u gathered bytes, S_u unsharded gradient bytes, s_u reduced gradient shard; positions i are
operators in forward order, and a unit spans the positions that run inside its module. Between optimizer steps lives

    base    = sum_u (parameters + optimizer state)_u / N  +  buffers  +  batch

and at position i, with A_i the tensors saved for backward by operators up to i and w_i the workspace of operator i:

    fwd(i)  = base + sum_u s_u + [P of units gathered by i and not freed: DP, or i inside the unit] + A_i + w_i
    loss    = base + sum_u s_u + [P of DP units] + A + workspace of the loss
    bwd(i)  = base + [P still gathered, as above] + [P of the ZDP unit prefetched next] + S so far + S_u + sum s_v + A_i
    rs(i)   = the same with P_u freed, one S_u and the new s_u
    opt     = base + sum_u s_u + temporaries of the optimizer

`fwd` carries the last step's reduced gradients because Lightning zeroes them between forward and backward. `bwd`
counts S_u twice at the unit's first operator: per-parameter gradients and their flat concatenation live together for
a moment. The root unit is gathered throughout, and its gradients stay unsharded to the end of backward.

References:
    torch/distributed/fsdp/_runtime_utils.py (unshard, prefetch, reduce), _flat_param.py (padding, flat gradient);
    lightning/pytorch/loops/optimization/automatic.py (order of forward, zero_grad, backward).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost.cost import Workload


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


@dataclass
class _Live:
    """Bytes alive by what they are; `snapshot` keeps the largest moment."""

    parts: dict[str, float]
    best: PeakMemory = field(default_factory=lambda: PeakMemory(peak_bytes=-1, phase="", operator=""))

    def add(self, part: str, num_bytes: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + num_bytes

    def snapshot(self, phase: str, operator: str, **moment: float) -> None:
        total = sum(self.parts.values()) + sum(moment.values())
        if total > self.best.peak_bytes:
            parts = dict(self.parts)
            for part, num_bytes in moment.items():
                parts[part] = parts.get(part, 0.0) + num_bytes
            rounded = {part: round(num_bytes) for part, num_bytes in parts.items() if round(num_bytes)}
            self.best = PeakMemory(peak_bytes=round(total), phase=phase, operator=operator, parts=rounded)


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
    """Largest number of live bytes on one rank in one optimizer step.

    Args:
        profile: the model.
        units: partition of its operators.
        modes: one per unit.
        world_size: N. With one rank FSDP1 does not shard, and nothing is gathered.
        workload: micro-batch size and number of micro-batches; gradients are reduced in each.
        backward_prefetch: FSDP1's ``BACKWARD_PRE`` ("pre"), ``BACKWARD_POST`` ("post") or None ("none").
        forward_prefetch: FSDP1's option of the same name.
    """
    schedule = _Schedule(profile, units, modes, world_size=world_size)
    samples = workload.micro_batch_size
    live = _Live(
        {
            "parameter shards": sum(map(schedule.shard_bytes, range(len(units)))),
            "optimizer state": sum(unit.optimizer_bytes for unit in units) / world_size,
            "buffers": profile.buffer_bytes,
            "batch": profile.batch_bytes_per_sample * samples,
            "reduced gradients": sum(map(schedule.reduced_bytes, range(len(units)))),
        }
    )
    _forward(live, profile, schedule, samples, forward_prefetch=forward_prefetch)
    if workload.num_micro_batches == 1:
        live.parts["reduced gradients"] = 0.0
    _backward(live, profile, schedule, samples, prefetch=backward_prefetch, accumulates=workload.num_micro_batches > 1)
    reduced = [schedule.reduced_bytes(u) for u in range(len(units))]
    at_once = sum(reduced) if profile.optimizer_is_foreach else max(reduced, default=0.0)
    live.parts |= {"reduced gradients": sum(reduced), "unsharded gradients": 0.0}
    live.snapshot("optimizer step", "", workspace=profile.optimizer_workspace_ratio * at_once)
    return live.best


class _Schedule:
    """When each unit is gathered and freed, by position of operators."""

    def __init__(
        self, profile: ModelProfile, units: Sequence[UnitProfile], modes: Sequence[ShardingMode], *, world_size: int
    ) -> None:
        self.units, self.world_size = units, world_size
        self.frees = [not mode.resident and not unit.is_root for unit, mode in zip(units, modes, strict=True)]
        owner = {operator.name: index for index, unit in enumerate(units) for operator in unit.operators}
        self.owner = [owner[operator.name] for operator in profile]
        self.starts: list[list[int]] = [[] for _ in self.owner]
        self.ends: list[list[int]] = [[] for _ in self.owner]
        for index, unit in enumerate(units):
            if self.owner:
                self.starts[unit.first].append(index)
                self.ends[unit.last].append(index)
        # For prefetch: the unit whose forward starts after this position, and the one whose forward ended before it.
        self.next_start = _next_where(self.starts)
        self.previous_end = _next_where(self.ends[::-1])[::-1]
        inner = [[unit for unit in ending if not units[unit].is_root] for ending in self.ends]
        self.last_end = next((ending[:1] for ending in reversed(inner) if ending), [])

    def gathered_bytes(self, unit: int) -> float:
        """P: the flat parameter, padded to a multiple of N elements; nothing is gathered on one rank."""
        return float(self.units[unit].gathered_bytes) if self.world_size > 1 else 0.0

    def shard_bytes(self, unit: int) -> float:
        return self.units[unit].parameter_bytes / self.world_size

    def reduced_bytes(self, unit: int) -> float:
        """s: the reduced gradient's shard, of the whole flat parameter once any of it is trainable."""
        return self.shard_bytes(unit) if self.units[unit].trainable_bytes else 0.0

    def flat_gradient_bytes(self, unit: int) -> float:
        """S: the unsharded gradient of the flat parameter."""
        return float(self.units[unit].gathered_bytes) if self.units[unit].gradient_bytes else 0.0


def _next_where(units_at: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """For each position, the outermost unit (the first listed) at the next position that has any."""
    following: list[Sequence[int]] = []
    upcoming: Sequence[int] = ()
    for units in reversed(units_at):
        following.append(upcoming)
        if units:
            upcoming = units[:1]
    return following[::-1]


def _forward(live: _Live, profile: ModelProfile, schedule: _Schedule, samples: int, *, forward_prefetch: bool) -> None:
    for i, operator in enumerate(profile):
        for unit in schedule.starts[i]:
            live.add("gathered parameters", schedule.gathered_bytes(unit))
        live.add("activations", operator.activation_bytes_per_sample * samples)
        upcoming = schedule.next_start[i] if forward_prefetch else ()
        live.snapshot(
            "forward",
            operator.name,
            **{
                "gathered parameters": sum(map(schedule.gathered_bytes, upcoming)),
                "workspace": operator.forward_workspace_bytes_per_sample * samples,
            },
        )
        for unit in schedule.ends[i]:
            if schedule.frees[unit]:
                live.add("gathered parameters", -schedule.gathered_bytes(unit))
    live.add("activations", profile.loss_activation_bytes_per_sample * samples)
    live.snapshot("forward", "", workspace=profile.loss_forward_workspace_bytes_per_sample * samples)


def _backward(
    live: _Live, profile: ModelProfile, schedule: _Schedule, samples: int, *, prefetch: str, accumulates: bool
) -> None:
    gathered = {unit for unit, frees in enumerate(schedule.frees) if not frees}

    def gather(units: Iterable[int]) -> None:
        for unit in set(units) - gathered:
            live.add("gathered parameters", schedule.gathered_bytes(unit))
        gathered.update(units)

    if prefetch == "pre":
        # The root's backward begins with the loss, and gathers the unit whose forward ended last.
        gather(schedule.last_end)
    live.snapshot("backward", "", workspace=profile.loss_backward_workspace_bytes_per_sample * samples)
    live.add("activations", -profile.loss_activation_bytes_per_sample * samples)
    for i in range(len(profile.operators) - 1, -1, -1):
        operator = profile.operators[i]
        gather(schedule.ends[i])
        if prefetch == "pre":
            gather(schedule.previous_end[i])
        live.add("unsharded gradients", operator.gradient_bytes)
        live.snapshot("backward", operator.name, workspace=operator.backward_workspace_bytes_per_sample * samples)
        for unit in reversed(schedule.starts[i]):
            _reduce(live, schedule, unit, operator.name, accumulates=accumulates)
        live.add("activations", -operator.activation_bytes_per_sample * samples)


def _reduce(live: _Live, schedule: _Schedule, unit: int, operator: str, *, accumulates: bool) -> None:
    """The end of a unit's backward: flatten its gradients, free its parameter, reduce, keep the shard."""
    flat, reduced = schedule.flat_gradient_bytes(unit), schedule.reduced_bytes(unit)
    live.snapshot("backward", operator, **{"unsharded gradients": flat})
    live.add("gathered parameters", -schedule.gathered_bytes(unit))
    live.add("unsharded gradients", flat - schedule.units[unit].gradient_bytes)
    live.snapshot("reduce-scatter", operator, **{"reduced gradients": reduced})
    if schedule.world_size > 1 or accumulates:
        live.add("unsharded gradients", -flat)
    if not accumulates and schedule.world_size > 1:
        live.add("reduced gradients", reduced)


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
