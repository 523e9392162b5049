"""Bytes alive at each moment of one optimizer step under FSDP1: a running sum over forward and backward.

Notation: units u with P_u gathered bytes, S_u unsharded gradient bytes, s_u reduced gradient shard; positions i are
operators in forward order, and a unit spans the positions that run inside its module. Between optimizer steps lives

    base    = sum_u (parameters + optimizer state)_u / N  +  buffers  +  batch

and at position i, with A_i the tensors saved for backward by operators up to i and w_i the workspace of operator i:

    fwd(i)  = base + sum_u s_u + [P of units gathered by i and not freed: DP, or i inside the unit] + A_i + w_i
    loss    = base + sum_u s_u + [P of DP units] + A + workspace of the loss
    bwd(i)  = base + [P still gathered, as above] + [P of the unit prefetched] + S so far + S_u + sum s_v + A_i
    rs(i)   = the same with P_u freed, and the new s_u: gloo copies the S_u that it reduces
    opt     = base + sum_u s_u + temporaries of the optimizer

`fwd` carries the last step's reduced gradients because Lightning zeroes them between forward and backward. `bwd`
counts S_u twice at the unit's first operator: per-parameter gradients and their flat concatenation live together for
a moment. The root unit is gathered throughout, and its gradients stay unsharded to the end of backward.

Modes enter in one way only. Take the units in the order in which forward leaves them. Those that forward has left and
backward has not come back to are the first k of them, for some k, and of these exactly the DP ones are gathered. So a
step in which every unit is ZDP, with k noted at each moment, tells the peak of every choice of modes.

A unit that forward calls again is counted as if its calls followed each other directly.

References:
    torch/distributed/fsdp/_runtime_utils.py (unshard, prefetch, reduce), _flat_param.py (padding, flat gradient);
    lightning/pytorch/loops/optimization/automatic.py (order of forward, zero_grad, backward).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost.cost import Workload


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes alive at one moment of a step in which every unit but the root is ZDP."""

    num_bytes: float
    phase: str
    """``forward``, ``backward``, ``reduce-scatter`` or ``optimizer step``."""
    operator: str
    """Operator that runs; the empty string in the loss and in the optimizer step."""
    parts: Mapping[str, float]
    """What the bytes consist of."""


def leaving_order(units: Sequence[UnitProfile]) -> tuple[int, ...]:
    """Positions of the units in the order in which forward leaves them, inner ones first; without the root."""
    inner = [index for index, unit in enumerate(units) if not unit.is_root]
    return tuple(sorted(inner, key=lambda index: (units[index].last, -index)))


def largest_moments(
    profile: ModelProfile,
    units: Sequence[UnitProfile],
    *,
    world_size: int,
    workload: Workload,
    backward_prefetch: str,
    forward_prefetch: bool,
) -> dict[int, Moment]:
    """By k, the largest moment at which the first k units of `leaving_order` are freed; none where nothing happens."""
    step = _Step(profile, units, world_size=world_size, workload=workload)
    step.run(backward_prefetch=backward_prefetch, forward_prefetch=forward_prefetch)
    return step.moments


def successive_moments(
    profile: ModelProfile,
    units: Sequence[UnitProfile],
    *,
    world_size: int,
    workload: Workload,
    backward_prefetch: str,
    forward_prefetch: bool,
) -> list[tuple[int, Moment]]:
    """All moments in the order in which they come, each with its k."""
    step = _Step(profile, units, world_size=world_size, workload=workload, keeps_all=True)
    step.run(backward_prefetch=backward_prefetch, forward_prefetch=forward_prefetch)
    return step.succession


class _Step:
    """What is alive, by what it is, while one step goes on."""

    def __init__(
        self,
        profile: ModelProfile,
        units: Sequence[UnitProfile],
        *,
        world_size: int,
        workload: Workload,
        keeps_all: bool = False,
    ) -> None:
        self.profile, self.units, self.world_size = profile, units, world_size
        self.samples, self.accumulates = workload.micro_batch_size, workload.num_micro_batches > 1
        self.order = leaving_order(units)
        self.place = {unit: place for place, unit in enumerate(self.order)}
        self.root = [index for index, unit in enumerate(units) if unit.is_root]
        self.starts: list[list[int]] = [[] for _ in profile.operators]
        self.ends: list[list[int]] = [[] for _ in profile.operators]
        for index in self.order:
            self.starts[units[index].first].append(index)
            self.ends[units[index].last].append(index)
        self.num_freed = 0
        self.moments: dict[int, Moment] = {}
        self.keeps_all = keeps_all  # a search has no use for them, and asks often
        self.succession: list[tuple[int, Moment]] = []
        self.parts = {
            "parameter shards": sum(unit.parameter_bytes for unit in units) / world_size,
            "optimizer state": sum(unit.optimizer_bytes for unit in units) / world_size,
            "buffers": float(profile.buffer_bytes),
            "batch": profile.batch_bytes_per_sample * self.samples,
            "reduced gradients": sum(map(self.reduced_bytes, range(len(units)))),
            "gathered parameters": sum(map(self.gathered_bytes, self.root)),
            "unsharded gradients": 0.0,
            "activations": 0.0,
            "workspace": 0.0,
        }

    def run(self, *, backward_prefetch: str, forward_prefetch: bool) -> None:
        """The whole step."""
        self.forward(prefetches=forward_prefetch)
        if not self.accumulates:
            self.parts["reduced gradients"] = 0.0
        self.backward(prefetch=backward_prefetch)
        self.update()

    def gathered_bytes(self, unit: int) -> float:
        """P: nothing is gathered on one rank."""
        return float(self.units[unit].gathered_bytes) if self.world_size > 1 else 0.0

    def reduced_bytes(self, unit: int) -> float:
        """s: the reduced gradient's shard, of the whole flat parameter once any of it is trainable."""
        return self.units[unit].parameter_bytes / self.world_size if self.units[unit].trainable_bytes else 0.0

    def flat_gradient_bytes(self, unit: int) -> float:
        """S: the unsharded gradient of the flat parameter."""
        return float(self.units[unit].gathered_bytes) if self.units[unit].gradient_bytes else 0.0

    def add(self, part: str, num_bytes: float) -> None:
        self.parts[part] += num_bytes

    def observe(self, phase: str, operator: str, part: str, num_bytes: float) -> None:
        """Notes the present moment, at which some bytes of one part live besides."""
        total = sum(self.parts.values()) + num_bytes
        known = self.moments.get(self.num_freed)
        is_largest = known is None or total > known.num_bytes
        if not is_largest and not self.keeps_all:
            return
        parts = {**self.parts, part: self.parts[part] + num_bytes}
        moment = Moment(num_bytes=total, phase=phase, operator=operator, parts=parts)
        if is_largest:
            self.moments[self.num_freed] = moment
        if self.keeps_all:
            self.succession.append((self.num_freed, moment))

    def forward(self, *, prefetches: bool) -> None:
        upcoming = _first_after(self.starts) if prefetches else [()] * len(self.starts)
        for i, operator in enumerate(self.profile):
            self.add("gathered parameters", sum(map(self.gathered_bytes, self.starts[i])))
            self.add("activations", operator.activation_bytes_per_sample * self.samples)
            prefetched = sum(map(self.gathered_bytes, upcoming[i]))
            self.add("gathered parameters", prefetched)
            self.observe(
                "forward", operator.name, "workspace", operator.forward_workspace_bytes_per_sample * self.samples
            )
            self.add("gathered parameters", -prefetched - sum(map(self.gathered_bytes, self.ends[i])))
            self.num_freed += len(self.ends[i])
        self.add("activations", self.profile.loss_activation_bytes_per_sample * self.samples)
        workspace = self.profile.loss_forward_workspace_bytes_per_sample * self.samples
        self.observe("forward", "", "workspace", workspace)

    def gather_down_to(self, place: int) -> None:
        """Backward gathers what it has not yet, from the last unit of the order to the one at ``place``."""
        while self.num_freed > max(place, 0):
            self.num_freed -= 1
            self.add("gathered parameters", self.gathered_bytes(self.order[self.num_freed]))

    def backward(self, *, prefetch: str) -> None:
        if prefetch == "pre" and any(self.units[root].gathered_bytes for root in self.root):
            # The root's backward begins with the loss; without parameters it has nothing to prefetch from.
            self.gather_down_to(len(self.order) - 1)
        workspace = self.profile.loss_backward_workspace_bytes_per_sample * self.samples
        self.observe("backward", "", "workspace", workspace)
        self.add("activations", -self.profile.loss_activation_bytes_per_sample * self.samples)
        for i in range(len(self.profile.operators) - 1, -1, -1):
            operator = self.profile.operators[i]
            for unit in reversed(self.ends[i]):
                self.gather_down_to(self.place[unit] - (prefetch == "pre"))
            self.add("unsharded gradients", operator.gradient_bytes)
            workspace = operator.backward_workspace_bytes_per_sample * self.samples
            self.observe("backward", operator.name, "workspace", workspace)
            for unit in sorted(self.starts[i], key=self.place.__getitem__):
                self.reduce(unit, operator.name, prefetches=prefetch == "post")
            if i == 0:
                for unit in self.root:
                    self.reduce(unit, operator.name, prefetches=False)
            self.add("activations", -operator.activation_bytes_per_sample * self.samples)

    def reduce(self, unit: int, operator: str, *, prefetches: bool) -> None:
        """The end of a unit's backward: flatten its gradients, free its parameter, reduce, keep the shard."""
        flat, reduced = self.flat_gradient_bytes(unit), self.reduced_bytes(unit)
        # autograd fills in zeros for the frozen parts of a flat parameter that is not all frozen
        self.add("unsharded gradients", flat - self.units[unit].gradient_bytes)
        self.observe("backward", operator, "unsharded gradients", flat)
        self.add("gathered parameters", -self.gathered_bytes(unit))
        if prefetches:
            self.gather_down_to(self.place[unit] - 1)
        copied = flat if self.world_size > 1 else 0.0
        self.add("unsharded gradients", copied)
        self.observe("reduce-scatter", operator, "reduced gradients", reduced)
        self.add("unsharded gradients", -copied)
        if self.world_size > 1 or self.accumulates:
            self.add("unsharded gradients", -flat)
        if self.world_size > 1 and not self.accumulates:
            self.add("reduced gradients", reduced)

    def update(self) -> None:
        """The optimizer step: all gradients are reduced, nothing is gathered."""
        reduced = [self.reduced_bytes(unit) for unit in range(len(self.units))]
        at_once = sum(reduced) if self.profile.optimizer_is_foreach else max(reduced, default=0.0)
        self.parts |= {"reduced gradients": sum(reduced), "unsharded gradients": 0.0}
        self.observe("optimizer step", "", "workspace", self.profile.optimizer_workspace_ratio * at_once)


def _first_after(units_at: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """For each position, the outermost unit at the next position that has any."""
    following: list[Sequence[int]] = []
    upcoming: Sequence[int] = ()
    for units in reversed(units_at):
        following.append(upcoming)
        upcoming = (min(units),) if units else upcoming
    return following[::-1]
