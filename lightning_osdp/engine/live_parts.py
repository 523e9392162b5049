"""What is alive on one rank while an optimizer step goes on: events read as bytes, as far as all engines agree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lightning_osdp.core.profile import OperatorProfile
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine.events import Event
from lightning_osdp.engine.layout import Layout


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


class LiveParts(ABC):
    """What is alive, by what it is, while one step goes on.

    Args:
        step: whose events are read.
        observer: told of every moment.
        layout: of its units on the rank in question.
    """

    def __init__(self, step: Step, observer: Observer, *, layout: Layout) -> None:
        self.profile, self.units, self.observer = step.profile, step.units, observer
        self.world_size, self.copies = step.cluster.world_size, step.cluster.reduce_scatter_copies
        self.samples, self.num_micro_batches = step.workload.micro_batch_size, step.workload.num_micro_batches
        self.is_in_backward = False
        self.segment = 0  # that backward has come to
        self.handed = 0.0  # bytes beyond the saved tensors where one segment of forward follows another
        self.settled = 0.0  # bytes beyond the saved tensors while a unit's gradients are reduced
        self.layout, self.sizes = layout, layout.units
        self.gradients = self._gradients()
        self.passing: dict[int, float] = {}  # by segment, bytes of gradients that its backward adds to others
        self.accumulated: set[int] = set()  # units whose gradients are whole
        self.reduced: set[int] = set()  # units whose gradients this step has reduced
        self.parts = {
            "parameter shards": self.layout.shards,
            "optimizer state": self.layout.optimizer_state,
            "buffers": float(step.profile.buffer_bytes),
            "batch": step.profile.batch_bytes.at(self.samples),
            "reduced gradients": sum(size.reduced for size in self.sizes),
            "gathered parameters": 0.0,
            "unsharded gradients": 0.0,
            "accumulated gradients": 0.0,
            "activations": 0.0,
            "workspace": 0.0,
        }
        self._readers = {
            "gather": self._gather,
            "await": self._await,
            "linger": self._linger,
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
        """What one event of `Engine.micro_batches` allocates and frees."""
        self._readers[event.kind](event.of)

    def update(self) -> None:
        """The optimizer step: all gradients are reduced, nothing is gathered."""
        self.parts |= {"reduced gradients": sum(size.reduced for size in self.sizes), "unsharded gradients": 0.0}
        self._observe("optimizer step", "", "workspace", self.layout.optimizer_temporaries)

    @abstractmethod
    def _gather(self, unit: int) -> None: ...

    @abstractmethod
    def _await(self, unit: int) -> None: ...

    def _linger(self, unit: int) -> None:
        """What a forward that is run again leaves behind: nothing."""
        del unit

    def _free(self, unit: int) -> None:
        self._add("gathered parameters", -self.sizes[unit].gathered)

    @abstractmethod
    def _flatten(self, unit: int) -> None: ...

    @abstractmethod
    def _accumulate(self, unit: int) -> None: ...

    @abstractmethod
    def _reduce(self, unit: int) -> None: ...

    @abstractmethod
    def _gradient_bytes(self, unit: UnitProfile, operator: OperatorProfile) -> int:
        """Gradients that an operator's backward makes in this unit."""

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

    def _observe_gather(self, unit: int, num_bytes: float) -> None:
        """The present moment, at which a unit is gathered."""
        phase = "backward" if self.is_in_backward else "forward"
        self._observe(phase, self._name(unit), "workspace", num_bytes + self.handed)

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
        """What forward builds up again; at its end that is part of the last segment's workspace in backward, too."""
        segment = self.profile.segments[index]
        self._observe("backward", segment.operator, "workspace", segment.rerun_workspace_bytes.at(self.samples))

    def _backward(self, index: int) -> None:
        self.segment, segment = index, self.profile.segments[index]
        for unit, num_bytes, complete in self.gradients.get(index, ()):
            self._add("unsharded gradients", num_bytes)
            if self._adds_in_place(unit):
                self.passing[complete] = self.passing.get(complete, 0.0) + num_bytes
        workspace = segment.backward_workspace_bytes.at(self.samples)
        self._observe("backward", segment.operator, "workspace", workspace)
        self._add("unsharded gradients", -self.passing.pop(index, 0.0))

    def _adds_in_place(self, unit: int) -> bool:
        """Whether new gradients of a unit are gone as soon as they are complete."""
        del unit
        return False

    def _release(self, index: int) -> None:
        self._add("activations", -self.profile.segments[index].saved_bytes.at(self.samples))

    def _settle(self, unit: int) -> None:
        """A unit's gradients are complete."""
        inside = self.profile.segments[self.segment : self.units[unit].last + 1]
        settled = next((segment.settled_bytes for segment in inside if segment.settled_bytes is not None), None)
        if settled is not None:
            # what the unit's backward has left of saved tensors, and the gradient that it hands on
            self.settled = settled.at(self.samples) - self.parts["activations"]

    def _name(self, unit: int) -> str:
        """The operator whose backward ends that of the unit."""
        return self.profile.segments[self.units[unit].first].operator

    def _gradients(self) -> dict[int, list[tuple[int, int, int]]]:
        """Segment -> units, with the bytes of gradients that its backward makes first, and where they are complete.

        Those of an operator come where backward reaches it; of one that is never called itself, where it reaches the
        nearest module around; of the root's own parameters at the end. They are complete where backward leaves its
        first call, and autograd holds them until then; those of a tied parameter, where it leaves their unit.
        """
        unit_of = {operator.name: index for index, unit in enumerate(self.units) for operator in unit.operators}
        calls: dict[str, list[int]] = {}
        for index, segment in enumerate(self.profile.segments[:-1]):
            calls.setdefault(segment.operator, []).append(index)
        made: dict[int, list[tuple[int, int, int]]] = {}
        for operator in self.profile:
            around = (list(self.profile.spans[name]) for name in operator.enclosing if name in self.profile.spans)
            spans = [(index, index) for index in calls.get(operator.name, ())] or next(around, [(0, 0)])
            complete, index = (spans[0][0], spans[-1][1]) if operator.name else (0, 0)
            unit = unit_of[operator.name]
            of = self.units[unit]
            own = sum(each.num_elements * each.gathered_itemsize for each in operator.parameters if each.is_trainable)
            if of.parameters and operator.gradient_bytes > own:
                complete = min(complete, of.first)
            made.setdefault(index, []).append((unit, self._gradient_bytes(of, operator), complete))
        return made
