"""What is alive on one rank while an optimizer step goes on: the events of `schedule` read as bytes.

The formulas that come of it are in `moments`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost.cost import Workload
from lightning_osdp.cost.layout import layout
from lightning_osdp.cost.schedule import Event


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes alive at one moment of a step."""

    num_bytes: float
    phase: str
    """``forward``, ``backward``, ``reduce-scatter`` or ``optimizer step``."""
    operator: str
    """Operator that runs; the empty string in the loss and in the optimizer step."""
    parts: Mapping[str, float]
    """What the bytes consist of."""

    def less(self, part: str, num_bytes: float) -> Moment:
        """The same moment with so many bytes fewer of one part."""
        if not num_bytes:
            return self
        parts = {**self.parts, part: self.parts[part] - num_bytes}
        return replace(self, num_bytes=self.num_bytes - num_bytes, parts=parts)


Observer = Callable[[float, Callable[[], Moment]], None]
"""Takes the bytes of each moment, and what makes a `Moment` of it where that is wanted."""


class LiveParts:
    """What is alive, by what it is, while one step goes on."""

    def __init__(
        self,
        profile: ModelProfile,
        units: Sequence[UnitProfile],
        observer: Observer,
        *,
        world_size: int,
        workload: Workload,
        reduce_scatter_copies: bool,
        rank: int | None = None,
    ) -> None:
        self.profile, self.units, self.observer, self.world_size = profile, units, observer, world_size
        self.samples, self.repeats = workload.micro_batch_size, workload.num_micro_batches
        self.copies = reduce_scatter_copies
        self.is_in_backward = False
        self.segment = 0  # that backward has come to
        self.handed = 0.0  # bytes beyond the saved tensors where one segment of forward follows another
        self.settled = 0.0  # bytes beyond the saved tensors while a unit's gradients are reduced
        self.gradients = _gradients(profile, units)
        self.layout = layout(tuple(units), profile.optimizer, world_size, rank)
        self.sizes = self.layout.units
        self.accumulated: set[int] = set()  # units whose gradients are whole
        self.reduced: set[int] = set()  # units whose gradients this step has reduced
        self.parts = {
            "parameter shards": self.layout.shards,
            "optimizer state": self.layout.optimizer_state,
            "buffers": float(profile.buffer_bytes),
            "batch": profile.batch_bytes.at(self.samples),
            "reduced gradients": sum(size.reduced for size in self.sizes),
            "gathered parameters": 0.0,
            "unsharded gradients": 0.0,
            "accumulated gradients": 0.0,
            "activations": 0.0,
            "workspace": 0.0,
        }
        self._readers = {
            "gather": self._gather,
            "free": self._free,
            "forward": self._forward,
            "zero": self._zero,
            "rerun": self._rerun,
            "backward": self._backward,
            "flatten": self._flatten,
            "accumulate": self._accumulate,
            "reduce": self._reduce,
            "release": self._release,
        }

    def begin_micro_batch(self) -> None:
        """Forward comes."""
        self.is_in_backward = False

    def read(self, event: Event) -> None:
        """What one event of `schedule.micro_batches` allocates and frees."""
        reader = self._readers.get(event.kind)
        if reader is not None:
            reader(event.of)

    def _add(self, part: str, num_bytes: float) -> None:
        self.parts[part] += num_bytes

    def _observe(self, phase: str, operator: str, part: str, num_bytes: float) -> None:
        """Reports the present moment, at which some bytes of one part live besides."""
        total = sum(self.parts.values()) + self.settled + num_bytes

        def moment() -> Moment:
            parts = {**self.parts, part: self.parts[part] + num_bytes}
            parts["workspace" if self.settled > 0 else "activations"] += self.settled
            return Moment(num_bytes=total, phase=phase, operator=operator, parts=parts)

        self.observer(total, moment)

    def _gather(self, unit: int) -> None:
        size = self.sizes[unit]
        self._add("gathered parameters", size.gathered)
        if size.cast_shard:
            phase = "backward" if self.is_in_backward else "forward"
            self._observe(phase, self._name(unit), "workspace", size.cast_shard + self.handed)

    def _free(self, unit: int) -> None:
        self._add("gathered parameters", -self.sizes[unit].gathered)

    def _forward(self, index: int) -> None:
        segment = self.profile.segments[index]
        self._add("activations", segment.saved_bytes.at(self.samples))
        workspace = segment.forward_workspace_bytes.at(self.samples)
        self._observe("forward", segment.operator, "workspace", workspace)
        self.is_in_backward = index == len(self.profile.segments) - 1
        self.handed = 0.0 if self.is_in_backward else segment.handed_bytes.at(self.samples)

    def _zero(self, _: int) -> None:
        """Lightning drops reduced gradients between the first forward and its backward."""
        self.parts["reduced gradients"] = 0.0

    def _rerun(self, index: int) -> None:
        """What forward builds up again is part of the segment's workspace in backward."""
        segment = self.profile.segments[index]
        self._observe("backward", segment.operator, "workspace", segment.backward_workspace_bytes.at(self.samples))

    def _backward(self, index: int) -> None:
        self.segment, segment = index, self.profile.segments[index]
        self._add("unsharded gradients", self.gradients.get(index, 0))
        workspace = segment.backward_workspace_bytes.at(self.samples)
        self._observe("backward", segment.operator, "workspace", workspace)

    def _release(self, index: int) -> None:
        self._add("activations", -self.profile.segments[index].saved_bytes.at(self.samples))

    def _flatten(self, unit: int) -> None:
        """Per-parameter gradients and their flat concatenation live together."""
        size = self.sizes[unit]
        inside = self.profile.segments[self.segment : self.units[unit].last + 1]
        settled = next((segment.settled_bytes for segment in inside if segment.settled_bytes is not None), None)
        if settled is not None:
            # what the unit's backward has left of saved tensors, and the gradient that it hands on
            self.settled = settled.at(self.samples) - self.parts["activations"]
        self._observe("backward", self._name(unit), "unsharded gradients", size.flat_gradient)
        self._add("unsharded gradients", size.flat_gradient - size.gradients)

    def _accumulate(self, unit: int) -> None:
        """The gradient is left whole, or is gone once it is added to the one that is there."""
        flat = self.sizes[unit].flat_gradient
        self._add("unsharded gradients", -flat)
        if unit not in self.accumulated:
            self.accumulated.add(unit)
            self._add("accumulated gradients", flat)
        self.settled = 0.0

    def _reduce(self, unit: int) -> None:
        """The gradient is reduced, cast to the dtype at rest where that is another, and its shard is kept.

        Where gradients were accumulated, it is their sum that is reduced; the last micro-batch's own one still lives.
        """
        size = self.sizes[unit]
        flat, name, is_sharded = size.flat_gradient, self._name(unit), self.world_size > 1
        is_cast = size.scattered != size.reduced
        if is_sharded:
            self._observe("reduce-scatter", name, "unsharded gradients", size.scattered + flat * self.copies)
        if is_cast:
            # on one rank the sum of micro-batches is cast down and up again
            beside = size.reduced + (size.scattered if is_sharded else flat * (self.repeats > 1))
            self._observe("backward", name, "unsharded gradients", beside)
        self._add("unsharded gradients", -flat)
        if unit in self.accumulated:
            self.accumulated.remove(unit)
            self._add("accumulated gradients", -flat)
        if unit not in self.reduced:
            self.reduced.add(unit)
            self._add("reduced gradients", size.reduced)
        self.settled = 0.0

    def _name(self, unit: int) -> str:
        """The operator whose backward ends that of the unit."""
        return self.profile.segments[self.units[unit].first].operator

    def update(self) -> None:
        """The optimizer step: all gradients are reduced, nothing is gathered."""
        self.parts |= {"reduced gradients": sum(size.reduced for size in self.sizes), "unsharded gradients": 0.0}
        self._observe("optimizer step", "", "workspace", self.layout.optimizer_temporaries)


def _gradients(profile: ModelProfile, units: Sequence[UnitProfile]) -> dict[int, int]:
    """Segment -> bytes of the gradients that its backward makes first.

    Those of an operator come where backward reaches it; of one that is never called itself, where it reaches the
    nearest module around; of the root's own parameters at the end. In a unit that is not all frozen, frozen parameters
    have gradients, too: they are views of a flat parameter that requires one.
    """
    partly = {operator.name for unit in units if unit.gradient_bytes for operator in unit.operators}
    last = {segment.operator: index for index, segment in enumerate(profile.segments[:-1])}
    made: dict[int, int] = {}
    for operator in profile:
        around = (profile.spans[name][-1][1] for name in operator.enclosing if name in profile.spans)
        index = last.get(operator.name, next(around, 0)) if operator.name else 0
        frozen = operator.frozen_bytes if operator.name in partly else 0
        made[index] = made.get(index, 0) + operator.gradient_bytes + frozen
    return made
