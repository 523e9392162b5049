"""Bytes alive on one rank under ``fully_shard``: the events of `schedule` read as bytes.

Letters stand for bytes of one unit: w unsharded, s its shard, g its gradients, l the gradient of its last parameter, r
the input of its reduce-scatter, A its saved tensors, h the gradient that it hands on. There are L equal units, and
backward has reduced the units after the i-th. Beside the states between steps live:

    forward     (L-1) k + 3 w + A                                            k = w where units are kept, else 0
    copy-out    (L-1-i) s + i k + q + 2 w + h + A_i                          q = r of the unit reduced before
    compute     (L-1-i) s + i k + q + w + p + g + A_i                        p = w of the unit prefetched
    reduce      (L-1-i) s + i k + p + r + l + r/N + max(cast s, gloo r) + A_i

On gloo q is 2 r, and the last term the sum of both.

- An all-gather fills one buffer, from which each parameter is copied. In forward the buffer of a unit lives until the
  next unit has been copied out, so that two of them live beside the copy; unless unsharding is asynchronous: then, and
  in backward, it is gone after the copy. Where forward is run again in backward, it is gone when the unit's has run.
- Under mixed precision the shard is cast for an all-gather, and what a reduce-scatter returns is cast to the dtype at
  rest.
- Gradients are copied into one tensor to be reduced. It lives until backward is through with the next unit, or is over.
  The last gradient lives while the tensor is reduced, a name outlives the loop. Where the backend copies, what it
  receives lives as long, and so does what it returns, where that is cast or added to gradients of micro-batches before.
  Units that are sharded in the node wait for their reduce-scatters: what these return lives so for the all-reduce
  between nodes. Gradients of units that each rank has all of are gone once they are copied, where the backend copies.
- Where forward leaves a shard in each node, it is cut from what was gathered, in the dtype of computing and with its
  paddings. It lives until backward has copied out what is gathered of it; under mixed precision it is copied for that.
- A shard on the host is copied for an all-gather in the dtype of computing; the copy lives as that of a shard that is
  cast does.
  On one rank it is copied where the unit would be gathered, and lives until the unit is copied out of it. The shard of
  its reduced gradient is copied to the host and gone, where the backend copies with what its reduce-scatter returns.
- Where a unit is sharded in the node, each rank keeps what it has all-reduced between nodes until backward is over: of
  its own beside the reduced gradients where these have another dtype, or are added to those of earlier micro-batches.
  Where the last micro-batch alone all-reduces, what the others have scattered is left in its place, in the dtype of
  reducing.
- A resident unit is there all the time, also while the optimizer steps. Before a step all of them are gathered that are
  not there yet, one parameter after the other, the largest first. Each then has no shard of its own, but where that is
  cast.
- Backward makes the gradient of the shard of a unit that moves activations, which needs no reduction. Under mixed
  precision the unit's shard is cast, and stays so for backward. The profile's segments have the bytes of its
  activations.
- On one rank there are no other buffers, but shards are copied all the same, and cast in copying.
- Gradients that are not reduced are left as backward makes them, and added to in place; or cast to the dtype of
  reducing, where that is another, and those of the next micro-batch are added when a unit has all of them.
- Where blocks offload, and copies go on beside computing, what two of them copy may be there besides at any time of
  forward and backward: a bound.

References:
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (``wait_for_unshard``, ``post_backward``),
    _fsdp_collectives.py (``foreach_reduce``). [Within 0.1% of a count of live storages for equal units, in torch 2.13.]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.profile import OperatorProfile
from lightning_osdp.core.step import Step
from lightning_osdp.planner.engine.events import Event, Kind
from lightning_osdp.planner.engine.layout import Layout, chunk_elements, retaining_bytes


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes alive at one moment of a step."""

    num_bytes: float
    phase: str
    """``forward``, ``backward``, ``reduce-scatter`` or ``optimizer step``."""
    operator: str
    """Operator that runs; the empty string in the loss and in the optimizer step."""
    parts: Mapping[str, float]
    """Parts of the bytes, by name."""
    gather_buffers: float = 0.0
    """Bytes of gathered parameters that are filled in a stream of their own: by synchronous all-gathers, or copies."""

    def less(self, part: str, num_bytes: float) -> Moment:
        """Returns the moment with so many bytes fewer of one part."""
        if not num_bytes:
            return self
        parts = {**self.parts, part: self.parts[part] - num_bytes}
        return replace(self, num_bytes=self.num_bytes - num_bytes, parts=parts)


Observer = Callable[[float, Callable[[], Moment]], None]
"""Takes the bytes of each moment, and what makes a `Moment` of it where that is wanted."""


REDUCTIONS_IN_FLIGHT = 1
"""Reductions that may go on while backward computes: the next one's gradients are not copied before."""

BLOCKS_IN_FLIGHT = 2
"""Most blocks that are on the device because they are on their way to the host or back, where copies go on beside
computing: the one that runs, and its neighbour. In forward that is the one before, whose copies end meanwhile; in
backward the one that comes next, whose copies begin."""


def in_flight_bytes(cluster: Cluster, copied: Iterable[float]) -> float:
    """Most bytes that are on the device because of `BLOCKS_IN_FLIGHT`; none where copies hold up computing."""
    return sum(sorted(copied)[-BLOCKS_IN_FLIGHT:]) if cluster.host_copies_overlap else 0.0


class LiveParts:
    """Live bytes by kind while one step goes on.

    Parameters and gradients are tensors of their own, and are copied to and from what collectives use.

    Arguments are as of `FSDP2.live_parts`. ``layout`` is that of the units on the rank in question, ``shards`` the
    number of ranks that each is sharded over, ``resident`` units that `begin_step` gathers and that are there from then
    on, ``exchanging`` ones that move activations; where ``is_bound``, what is left of one unit while another runs is
    the most that other modes would leave.
    """

    def __init__(
        self,
        step: Step,
        observer: Observer,
        *,
        layout: Layout,
        shards: Sequence[int],
        resident: Sequence[int],
        exchanging: Sequence[int],
        asynchronous_unshard: bool,
        is_bound: bool,
    ) -> None:
        self.profile, self.units, self.observer = step.profile, step.units, observer
        self.world_size = step.cluster.world_size
        self.copies = step.cluster.reduce_scatter_copies and self.world_size > 1
        self.node_size = step.cluster.node_size or self.world_size
        self.samples, self.num_micro_batches = step.workload.micro_batch_size, step.workload.num_micro_batches
        self.layout, self.sizes, self.shards = layout, layout.units, shards
        self.is_synchronous, self.is_bound = not asynchronous_unshard, is_bound
        self.is_in_backward = False
        self.is_over = False  # backward, but for what is left to reduce
        self.segment = 0  # that backward has come to
        self.handed = 0.0  # bytes beyond the saved tensors where one segment of forward follows another
        self.received = 0.0  # the same where backward comes from one segment to the one before
        self.settled = 0.0  # bytes beyond the saved tensors while a unit's gradients are reduced
        self.pending: set[int] = set()  # units whose buffer is not copied out yet
        self.copied: int | None = None  # the unit that was awaited last, if it was copied out then
        self.resident = resident
        self.whole: set[int] = set()  # units that are copied out
        self.retained: set[int] = set()  # units of which there is a shard in each node
        self.buffers = 0.0  # that all-gathers have filled, with the next one
        self.lingering = 0.0  # the buffer that forward has copied out last
        self.sent = 0.0  # what the latest reduce-scatter took
        self.exchanging = {*exchanging}
        self.gradients = self._gradients()
        self.passing: dict[int, float] = {}  # by segment, bytes of gradients that its backward adds to others
        self.accumulated: set[int] = set()  # units whose gradients are whole
        self.reduced: set[int] = set()  # units whose gradients this step has reduced
        self.partial: dict[int, float] = {}  # bytes of units that are reduced in the node alone so far
        self.all_reduced = 0.0  # what backward holds of what it has reduced between nodes
        self.parts = {
            "parameter shards": self.layout.shards,
            "optimizer state": self.layout.optimizer_state,
            "buffers": float(step.profile.buffer_bytes),
            "workspaces of libraries": float(step.cluster.library_workspace_bytes),
            "batch": step.profile.batch_bytes.at(self.samples),
            "reduced gradients": sum(size.kept_gradient for size in self.sizes),
            "gathered parameters": 0.0,
            "unsharded gradients": 0.0,
            "accumulated gradients": 0.0,
            "activations": 0.0,
            "workspace": 0.0,
        }
        copied = (size.at(self.samples) for _, size in step.profile.copied)
        self.parts["copies in flight"] = in_flight_bytes(step.cluster, copied)
        self._readers: dict[str, Callable[[int], None]] = {kind: getattr(self, f"_{kind}") for kind in get_args(Kind)}

    def begin_step(self) -> None:
        """Begins a step, before which nothing is gathered: with what is resident."""
        parameters = [(each, unit) for unit in self.resident for each in self.sizes[unit].parameters]
        for each, unit in sorted(parameters, reverse=True):
            buffer = each.gathered if self.shards[unit] > 1 else min(each.gathered, self.sizes[unit].cast_shard)
            self._add("gathered parameters", each.gathered)
            self._observe("forward", self._name(unit), "gathered parameters", buffer)
            self._add("parameter shards", -each.shared)
        self.whole.update(self.resident)

    def begin_micro_batch(self) -> None:
        """Begins a micro-batch, with its forward."""
        self.is_in_backward = self.is_over = False
        self.received = 0.0
        self._send(0.0)
        self._drop_all_reduced()

    def read(self, event: Event) -> None:
        """Allocates and frees as one event of `FSDP2.micro_batches` does: there is a method for each kind."""
        self._readers[event.kind](event.of)

    def read_all(self, micro_batches: Iterable[Iterable[Event]]) -> None:
        """A whole step of these events, with its update."""
        self.begin_step()
        for events in micro_batches:
            self.begin_micro_batch()
            for event in events:
                self.read(event)
        self.update()

    def update(self) -> None:
        """The optimizer step: all gradients are reduced, nothing is gathered but what is resident."""
        self._drop_all_reduced()
        self.parts |= {"reduced gradients": sum(size.kept_gradient for size in self.sizes), "unsharded gradients": 0.0}
        self.parts["copies in flight"] = 0.0
        self._observe("optimizer step", "", "workspace", self.layout.optimizer_temporaries)

    def _copy_in(self, _: int) -> None:
        """Copies the shard for the all-gather that follows, beside which the copy is counted."""

    def _gather(self, unit: int) -> None:
        self._fill_buffer(unit, self.sizes[unit].sent_shard)

    def _gather_in_node(self, unit: int) -> None:
        self._fill_buffer(unit, self.sizes[unit].cast_shard * self.shards[unit] / self.node_size)

    def _retain(self, unit: int) -> None:
        self._observe_gather(unit, retaining_bytes(self.units[unit], self.world_size, self.node_size))
        self.retained.add(unit)
        self._add("gathered parameters", self.sizes[unit].gathered / self.node_size)

    def _drop_retained(self, unit: int) -> None:
        if unit in self.retained:
            self.retained.remove(unit)
            self._add("gathered parameters", -self.sizes[unit].gathered / self.node_size)

    def _fill_buffer(self, unit: int, sent_shard: float) -> None:
        """An all-gather of a unit, beside which its shard is cast, or copied from the host."""
        size = self.sizes[unit]
        if self.is_bound and self.world_size == 1 and not size.buffer:
            # a prefetched unit has no buffer, which elsewhere is as large as what a mode would keep of it
            self._copy_out(unit, size.sent_shard)
            return
        self.pending.add(unit)
        self._add_buffer(size.buffer)
        if sent_shard and self.world_size > 1:
            self._observe_gather(unit, sent_shard)

    def _exchange_inputs(self, unit: int) -> None:
        self._add("gathered parameters", self.sizes[unit].cast_shard)

    def _exchange_outputs(self, unit: int) -> None:
        if not self._reads_weights(unit):
            self._add("gathered parameters", -self.sizes[unit].cast_shard)

    def _exchange_output_gradients(self, _: int) -> None:
        """Takes place while the last operator runs backward, whose segment has its bytes."""

    def _exchange_input_gradients(self, unit: int) -> None:
        if self._reads_weights(unit):
            self._add("gathered parameters", -self.sizes[unit].cast_shard)
        if unit not in self.reduced:  # else they were added to what earlier micro-batches have left
            made = sum(self._shard_gradient_bytes(operator, unit) for operator in self.units[unit].operators)
            self._add("unsharded gradients", -made)
            self._keep_reduced(unit)

    _exchange_inputs_in_node, _exchange_outputs_in_node = _exchange_inputs, _exchange_outputs
    _exchange_output_gradients_in_node = _exchange_output_gradients
    _exchange_input_gradients_in_node = _exchange_input_gradients

    def _sum_between(self, _: int) -> None:
        """Sums gradients between nodes in place."""

    def _await(self, unit: int) -> None:
        self.copied = unit if unit in self.pending else None
        if self.copied is None:
            return
        self.pending.remove(unit)
        size = self.sizes[unit]
        self._copy_out(unit, 0.0 if self.world_size > 1 else size.sent_shard)
        self._add_buffer(-size.buffer)
        self._drop_retained(unit)
        if not self.is_in_backward:
            self._linger(unit)

    def _copy_out(self, unit: int, beside: float) -> None:
        self.whole.add(unit)
        self._add("gathered parameters", self.sizes[unit].gathered)
        self._observe_gather(unit, beside + self.received)

    def _linger(self, unit: int) -> None:
        if self.is_synchronous and self.world_size > 1 and unit == self.copied:
            # units that are kept from an earlier micro-batch, or to be called again, leave an earlier buffer for longer
            buffer = self.sizes[unit].buffer
            self._leave(max(self.lingering, buffer) if self.is_bound else buffer)

    def _leave(self, num_bytes: float) -> None:
        self._add_buffer(num_bytes - self.lingering)
        self.lingering = num_bytes

    def _add_buffer(self, num_bytes: float) -> None:
        self._add("gathered parameters", num_bytes)
        self.buffers += num_bytes

    def _free(self, unit: int) -> None:
        """Frees a unit; at the end of backward the unit may not be there."""
        if unit in self.whole:
            self.whole.remove(unit)
            self._add("gathered parameters", -self.sizes[unit].gathered)
        if self.is_in_backward:
            self._drop_retained(unit)

    def _forward(self, index: int) -> None:
        segment = self.profile.segments[index]
        self._add("activations", segment.saved_bytes.at(self.samples))
        workspace = segment.forward_workspace_bytes.at(self.samples)
        self._observe("forward", segment.operator, "workspace", workspace)
        self.is_in_backward = index == len(self.profile.segments) - 1
        self.handed = 0.0 if self.is_in_backward else segment.handed_bytes.at(self.samples)
        if self.is_in_backward:
            self._leave(0.0)

    def _zero(self, _: int) -> None:
        """Lightning drops reduced gradients between the first forward and its backward."""
        self.parts["reduced gradients"] = 0.0

    def _rerun(self, index: int) -> None:
        """Builds up saved tensors again; at the end they are part of the last segment's workspace in backward, too."""
        segment = self.profile.segments[index]
        self._observe("backward", segment.operator, "workspace", segment.rerun_workspace_bytes.at(self.samples))
        if self.copied is not None and any(last == index for _, last in self.units[self.copied].calls):
            self._leave(0.0)

    def _backward(self, index: int) -> None:
        self.received = 0.0
        self.segment, segment = index, self.profile.segments[index]
        for unit, num_bytes, complete in self.gradients.get(index, ()):
            self._add("unsharded gradients", num_bytes)
            if self._adds_in_place(unit) or (unit in self.exchanging and unit in self.reduced):
                self.passing[complete] = self.passing.get(complete, 0.0) + num_bytes
        workspace = segment.backward_workspace_bytes.at(self.samples)
        self._observe("backward", segment.operator, "workspace", workspace)
        self._add("unsharded gradients", -self.passing.pop(index, 0.0))

    def _release(self, index: int) -> None:
        segment = self.profile.segments[index]
        self._add("activations", -segment.saved_bytes.at(self.samples))
        if segment.ending_bytes is not None:
            beside = segment.ending_bytes.at(self.samples) - self.parts["activations"]
            self._observe("backward", segment.operator, "workspace", beside)
        self.is_over = index == 0
        passed = segment.passed_bytes
        # the gradient that it hands on: its own saved tensors are gone
        self.received = 0.0 if passed is None else passed.at(self.samples) - self.parts["activations"]

    def _flatten(self, unit: int) -> None:
        """A unit's gradients are complete."""
        if self.sizes[unit].gradients and not self.is_over:
            self._settle(unit)
        if unit in self.accumulated and not self._adds_in_place(unit):
            self._add("unsharded gradients", -self.sizes[unit].gradients)

    def _stay(self, unit: int) -> None:
        """Frees nothing of a resident unit, whose gradients are complete, if it has any."""
        self._flatten(unit)

    def _accumulate(self, unit: int) -> None:
        size = self.sizes[unit]
        if unit not in self.accumulated:
            if size.casting:
                self._observe("backward", self._name(unit), "accumulated gradients", size.casting)
            self.accumulated.add(unit)
            self._add("unsharded gradients", -size.gradients)
            self._add("accumulated gradients", size.whole_gradient)
        self.settled = 0.0

    def _reduce(self, unit: int) -> None:
        self._scatter(unit, goes_on=self.copies)
        self._keep_reduced(unit)

    def _reduce_in_node(self, unit: int) -> None:
        """Reduces gradients in the node; where the backend copies, their all-reduce goes on to the next reduction."""
        size = self.sizes[unit]
        if self.copies:
            self._scatter(unit, goes_on=True, is_received=True)
            self._keep_reduced(unit)
            return
        stays = size.scattered if unit in self.reduced or size.scattered != size.reduced else 0.0
        self._scatter(unit)
        self._keep_reduced(unit)
        self.all_reduced += stays
        self._add("reduced gradients", stays)

    def _reduce_whole(self, unit: int) -> None:
        """All-reduces gradients in place, once they are copied; where they are cast then, they stay to the end.

        Where the backend copies, that goes on, and they stay as long: the only copy of gradients that are gone.
        """
        if not self.copies:
            self._reduce_in_node(unit)
            return
        size, before = self.sizes[unit], self.sent
        self._send(0.0)
        self._observe("backward", self._name(unit), "unsharded gradients", size.scattered)
        self._drop_gradients(unit)
        is_cast = size.scattered != size.reduced
        self._observe("backward", self._name(unit), "unsharded gradients", size.scattered + size.reduced * is_cast)
        self._go_on(before, size.scattered * is_cast + self._passed_on(unit))
        self._keep_reduced(unit)

    def _keep_reduced(self, unit: int) -> None:
        if unit not in self.reduced:
            self.reduced.add(unit)
            self._add("reduced gradients", self.sizes[unit].kept_gradient)

    def _all_reduce(self, unit: int) -> None:
        """All-reduces gradients in place; gradients that micro-batches before have left were added to them."""
        self._add("accumulated gradients", -self.partial.pop(unit, 0.0))

    def _scatter_in_node(self, unit: int) -> None:
        """Reduces gradients in the node; the result is kept for the last micro-batch, or added to earlier results."""
        self._scatter(unit, casts=False)
        if unit not in self.partial:
            self.partial[unit] = self.sizes[unit].scattered
            self._add("accumulated gradients", self.partial[unit])

    def _scatter(self, unit: int, *, casts: bool = True, goes_on: bool = False, is_received: bool = False) -> None:
        """Gradients are copied and reduced; where that goes on, what is received and returned lives on as well.

        Where all is received, it is an all-reduce of what is returned that goes on.
        """
        size, name, before = self.sizes[unit], self._name(unit), self.sent
        self._send(0.0)
        last = size.last_whole_gradient if unit in self.accumulated else size.last_gradient
        sent, left = size.flat_gradient, size.flat_gradient + last + size.scattered
        cast = size.reduced if casts and size.scattered != size.reduced else 0.0
        received = sent * (self.copies and self.shards[unit] > 1)
        self._observe("backward", name, "unsharded gradients", sent)
        self._drop_gradients(unit)
        if self.world_size > 1:
            self._observe("reduce-scatter", name, "unsharded gradients", left + received)
        received *= goes_on and not is_received
        self._observe("backward", name, "unsharded gradients", left + received + cast)
        if goes_on:
            sent += received + size.scattered * bool(cast) + self._passed_on(unit)
        self._go_on(before, sent)

    def _drop_gradients(self, unit: int) -> None:
        """Frees gradients that were copied."""
        if unit in self.accumulated:
            self.accumulated.remove(unit)
            self._add("accumulated gradients", -self.sizes[unit].whole_gradient)
        else:
            self._add("unsharded gradients", -self.sizes[unit].gradients)

    def _passed_on(self, unit: int) -> float:
        """Bytes of reduced gradients that are added to earlier ones, or copied to the host, when a reduction ends."""
        size = self.sizes[unit]
        return size.reduced if unit in self.reduced or size.kept_gradient < size.reduced else 0.0

    def _go_on(self, before: float, sent: float) -> None:
        """Keeps what a reduction sends until the next one, where one of ``before`` bytes has kept its own so far."""
        # where others reduce in the last micro-batch only, an earlier one is there for longer
        self._send(max(before, sent) if self.is_bound and self.num_micro_batches > 1 else sent)
        self.settled = 0.0

    def _drop_all_reduced(self) -> None:
        self._add("reduced gradients", -self.all_reduced)
        self.all_reduced = 0.0

    def _send(self, num_bytes: float) -> None:
        self._add("unsharded gradients", num_bytes - self.sent)
        self.sent = num_bytes

    def _adds_in_place(self, unit: int) -> bool:
        """Tells if new gradients of a unit are gone as soon as they are complete."""
        return unit in self.accumulated and not self.sizes[unit].casting

    def _add(self, part: str, num_bytes: float) -> None:
        self.parts[part] += num_bytes

    def _observe(self, phase: str, operator: str, part: str, num_bytes: float) -> None:
        """Reports the present moment, at which some bytes of one part live besides."""
        total = sum(self.parts.values()) + self.settled + num_bytes

        def moment() -> Moment:
            parts = {**self.parts, part: self.parts[part] + num_bytes}
            parts["workspace" if self.settled > 0 else "activations"] += self.settled
            buffers = self.buffers if self.is_synchronous or self.world_size == 1 else 0.0
            return Moment(num_bytes=total, phase=phase, operator=operator, parts=parts, gather_buffers=buffers)

        self.observer(total, moment)

    def _observe_gather(self, unit: int, num_bytes: float) -> None:
        """The present moment, at which a unit is gathered."""
        phase = "backward" if self.is_in_backward else "forward"
        self._observe(phase, self._name(unit), "workspace", num_bytes + self.handed)

    def _settle(self, unit: int) -> None:
        """A unit's gradients are complete."""
        inside = self.profile.segments[self.segment : self.units[unit].last + 1]
        settled = next((segment.settled_bytes for segment in inside if segment.settled_bytes is not None), None)
        if settled is not None:
            # the unit's backward has left these of the saved tensors, and hands on a gradient
            self.settled = settled.at(self.samples) - self.parts["activations"]

    def _name(self, unit: int) -> str:
        """The operator whose backward ends that of the unit."""
        return self.profile.segments[self.units[unit].first].operator

    def _gradients(self) -> dict[int, list[tuple[int, int, int]]]:
        """Segment -> units, with the bytes of gradients that its backward makes first, and where they are complete.

        Gradients of an operator come where backward reaches it. For an operator that is never called itself, that is
        the nearest module around it; for the root's own parameters, the end. Gradients are complete where backward
        leaves the operator's first call, and autograd holds them until then; a tied parameter's gradient is complete
        where backward leaves its unit.
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
            num_bytes = operator.gradient_bytes
            if unit in self.exchanging:
                num_bytes = self._shard_gradient_bytes(operator, unit)
            made.setdefault(index, []).append((unit, num_bytes, complete))
        return made

    def _reads_weights(self, unit: int) -> bool:
        exchange = self.units[unit].exchange
        return exchange is not None and exchange.reads_weights

    def _shard_gradient_bytes(self, operator: OperatorProfile, unit: int) -> int:
        """Gradient of a shard as backward makes it, where activations move."""
        number, trained = self.shards[unit], [each for each in operator.parameters if each.is_trainable]
        if not operator.parameters:
            return math.ceil(operator.gradient_bytes / number)
        return sum(chunk_elements(each, number) * each.gathered_itemsize for each in trained)
