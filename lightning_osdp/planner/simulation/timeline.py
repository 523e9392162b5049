"""Timeline of the events of a step: computing and the communicators, each first in, first out.

There is a communicator of all ranks, and one of the ranks of a node, whose links are others; what is all-reduced
between nodes goes over the links of the first, one after the other with what all ranks do. The host issues events ahead
of the device. A backend that blocks (gloo) has one resource for everything: time is the sum. Where communication
overlaps computing, a gather begins as soon as the communicator is free and

- what it sends may be copied, or comes from the host: an asynchronous gather copies in the stream that computes, and so
  waits for all computing that was issued before it; a synchronous one copies in a stream of its own, which waits until
  units before it are copied out, in forward all but the latest one. On the link to the host there is one copy at a
  time;
- computing waits for the gathers that it needs (AWAIT), and for exchanges of activations, which are of what was
  computed before, with the sums of gradients between nodes that come after them;
- a reduce-scatter, or an all-reduce of all ranks, waits for the backward that made its gradients, and the end of
  backward for all of them;
- computing waits for a reduce-scatter before it copies the gradients of the next unit that is reduced: torch holds one
  input at most (``reduce_scatter_max_input_buffers``). An all-reduce between nodes is waited for there only where the
  host waits for the reduce-scatter before it, as on CPU;
- gradients of a shard on the host are copied there once they are reduced, one copy at a time, which the end of
  backward waits for;
- the host may wait for some kinds of collectives (`Cluster.waits_for`), as a device without streams has it;
- updates on the host that may begin in backward are a resource of their own, first in, first out: each begins once the
  gradients of its unit are reduced in the last micro-batch. One that has not when backward is over is computed in the
  optimizer's step, in another number of seconds.

References:
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (``get_all_gather_streams``, ``wait_for_unshard``,
    ``post_backward``);
    collectives of one process group share one stream of NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from lightning_osdp.planner.cost import HostUpdate
from lightning_osdp.planner.engine import COLLECTIVES, HOLDING_UP, REDUCTIONS, Event

COMPUTE, COMMUNICATION, HOST = "compute", "communication", "host"
_COMPLETING = frozenset(
    kind for kind, each in COLLECTIVES.items() if each.operation in {"reduce_scatter", "all_reduce"}
)
"""Kinds of events of which the latest leaves a unit's gradients complete."""


class Interval(NamedTuple):
    """Event of a resource from when to when, in seconds from the start of the step."""

    resource: str
    event: Event
    micro_batch: int
    start_s: float
    end_s: float


class Durations(NamedTuple):
    """Seconds of every event: by segment, and by unit."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    collectives_s: Mapping[str, Sequence[float]]
    """Kind of a collective -> its seconds, by unit; those of nodes only where there are any."""
    overhead_s: Mapping[str, Sequence[float]]
    """Kind of an event -> what the runtime takes for it, see `Cluster.unit_overhead`, by unit. It keeps the device from
    computing; that of gathers is charged where the unit's gradients are flattened."""
    updates: Mapping[int, HostUpdate] = MappingProxyType({})
    """Unit -> its update on the host, where that may begin in backward."""
    copied_out_s: Mapping[int, float] = MappingProxyType({})
    """Unit -> seconds in which its reduced gradients are copied to the host."""


class Timeline:
    """Reads events in the order in which the host issues them; keeps intervals for a picture, where that is asked."""

    def __init__(
        self,
        durations: Durations,
        *,
        overlaps: bool,
        asynchronous_unshard: bool,
        copies_beside: bool = False,
        is_alone: bool = False,
        waits_for: Collection[str] = (),
        keeps_intervals: bool = False,
    ) -> None:
        self.copies_beside, self.is_alone = copies_beside, is_alone
        self.durations, self.overlaps, self.asynchronous_unshard = durations, overlaps, asynchronous_unshard
        self.waits_for = waits_for
        self.compute_s = 0.0
        self.communicators_s = {each.link: 0.0 for each in COLLECTIVES.values()}
        self.keeps_intervals = keeps_intervals
        self.intervals: list[Interval] = []
        self.ends_s = [0.0]
        """Beginning of the step, and then the ends of the micro-batches so far, in seconds."""
        self.slowed_s = 0.0
        """Seconds by which computing takes longer for collectives that run beside it."""
        self._slowed_s = [0.0]
        self.updating_s = 0.0
        """Seconds for which updates on the host go on when the latest micro-batch is over."""
        self.updates: list[Interval] = []
        """Updates on the host of units whose gradients the latest micro-batch has reduced."""
        self._reduced_s: dict[int, float] = {}  # when gradients were reduced in this one of units that are updated so
        self.stalls_s: dict[int, float] = {}
        """Unit -> seconds for which computing waited for its latest gather: that of backward, once that is over."""
        self._ready_s: dict[int, float] = {}
        self._due_s: dict[int, float] = {}  # overhead that is still to be charged
        self._copied_s = self._copied_before_s = 0.0  # when the latest unit was copied out, and the one before it
        self._copied_out_s = 0.0  # when the latest gradients have come to the host
        self._copied_in_s = 0.0  # when the latest shard has come from the host, in the stream of what gathers send
        self._scattered_s = 0.0  # when the latest reduce-scatter is over
        self._pending: set[int] = set()  # units that are not copied out yet
        self._is_in_backward = False
        self._readers: dict[str, Callable[[Event, int], None]] = {
            "await": self._await,
            "forward": self._forward,
            "backward": self._backward,
            "flatten": self._flatten,
            "stay": self._stay,
            "accumulate": self._accumulate,
        }
        of_operation = {
            "copy": self._copy_in,
            "all_gather": self._gather,
            "all_reduce": self._all_reduce,
        }
        self._readers |= {
            kind: self._exchange
            if kind in HOLDING_UP
            else self._reduce
            if kind in REDUCTIONS
            else of_operation[each.operation]
            for kind, each in COLLECTIVES.items()
        }

    @property
    def now_s(self) -> float:
        """Time at which everything issued so far is done, in seconds."""
        return max(self.compute_s, *self.communicators_s.values())

    def read(self, event: Event, micro_batch: int = 0) -> None:
        """Reads one more event: there is a method for each kind that takes time."""
        reader = self._readers.get(event[0])
        if reader is not None:
            reader(event, micro_batch)

    def read_all(self, events: Iterable[Event]) -> None:
        """Reads all events of a micro-batch that take time."""
        for event in events:
            self._readers[event[0]](event, 0)
        self.end_backward()

    def _copy_in(self, event: Event, micro_batch: int) -> None:
        if self.copies_beside:
            # one rank has room for no copy before it is through with the latest one
            may_start_s = self._copied_s if self.is_alone else self._may_gather_s()
            self._copied_in_s = self._communicate(event, micro_batch, may_start_s)
        else:
            self._compute(event, micro_batch, self.durations.collectives_s[event[0]][event[1]])

    def _gather(self, event: Event, micro_batch: int) -> None:
        of = event[1]
        self._pending.add(of)
        self._ready_s[of] = self._communicate(event, micro_batch, max(self._may_gather_s(), self._copied_in_s))
        self._due_s[of] = self._due_s.get(of, 0.0) + self.durations.overhead_s["gather"][of]

    def _await(self, event: Event, _: int) -> None:
        of, start_s = event[1], self.compute_s
        self._wait_for_gather(of)
        self.stalls_s[of] = self.compute_s - start_s
        if of in self._pending:
            self._pending.remove(of)
            self._copied_before_s = self.compute_s if self._is_in_backward else self._copied_s
            self._copied_s = self.compute_s

    def _forward(self, event: Event, micro_batch: int) -> None:
        self._compute(event, micro_batch, self.durations.forward_s[event[1]])

    def _backward(self, event: Event, micro_batch: int) -> None:
        self._is_in_backward = True
        self._compute(event, micro_batch, self.durations.backward_s[event[1]])

    def _flatten(self, event: Event, micro_batch: int) -> None:
        of = event[1]
        self._compute(event, micro_batch, self._due_s.pop(of, 0.0) + self.durations.overhead_s["flatten"][of])

    def _stay(self, event: Event, micro_batch: int) -> None:
        self._compute(event, micro_batch, self.durations.overhead_s["stay"][event[1]])

    def _accumulate(self, event: Event, micro_batch: int) -> None:
        self._compute(event, micro_batch, self.durations.overhead_s["accumulate"][event[1]])

    def _reduce(self, event: Event, micro_batch: int) -> None:
        self._wait_for_reduce_scatter()
        self._compute(event, micro_batch, self.durations.overhead_s["reduce"][event[1]])
        self._scattered_s = self._communicate(event, micro_batch, self.compute_s)

    def _all_reduce(self, event: Event, micro_batch: int) -> None:
        end_s = self._communicate(event, micro_batch, self._scattered_s)
        if "reduce_in_node" in self.waits_for:  # what goes on then is the all-reduce, before the next unit's reduction
            self._scattered_s = end_s

    def _exchange(self, event: Event, micro_batch: int) -> None:
        self.compute_s = max(self.compute_s, self._communicate(event, micro_batch, self.compute_s))

    def end_backward(self) -> None:
        """Computing goes on when all gradients are reduced, and are where they belong."""
        self._wait_for_all()
        if self._copied_out_s > self.compute_s:
            self.compute_s = self._copied_out_s
            self._wait_for_all()
        self._is_in_backward = False
        self.ends_s.append(self.now_s)
        self._slowed_s.append(self.slowed_s)
        if self._reduced_s:
            self.updates = list[Interval]()
            updated_s = 0.0
            for of, reduced_s in sorted(self._reduced_s.items(), key=itemgetter(1)):
                start_s, update = max(updated_s, reduced_s), self.durations.updates[of]
                updated_s = start_s + (update.beside_s if start_s <= self.now_s else update.after_s)
                self.updates.append(Interval(HOST, Event("reduce", of), len(self.ends_s) - 2, start_s, updated_s))
            self.updating_s = max(0.0, updated_s - self.now_s)
            self._reduced_s.clear()

    def repeat(self) -> None:
        """Adds a micro-batch like the one before, of which nothing is left."""
        self.compute_s += self.ends_s[-1] - self.ends_s[-2]
        self.slowed_s += self._slowed_s[-1] - self._slowed_s[-2]
        self.end_backward()

    def total_s(self, num_micro_batches: int) -> float:
        """Seconds of so many micro-batches, of which at most `MOST_SIMULATED` were simulated, and of updates after."""
        return _continued(self.ends_s, num_micro_batches) + self.updating_s

    def total_slowed_s(self, num_micro_batches: int) -> float:
        """Seconds of these micro-batches by which computing takes longer for collectives that run beside it."""
        return _continued(self._slowed_s, num_micro_batches)

    def _may_gather_s(self) -> float:
        """Time at which a gather that is issued now may begin, in seconds."""
        return self.compute_s if self.asynchronous_unshard else self._copied_before_s

    def _compute(self, event: Event, micro_batch: int, seconds: float) -> None:
        start_s = self.compute_s
        self._run(seconds)
        if self.keeps_intervals:
            self._keep(COMPUTE, event, micro_batch, start_s, self.compute_s)

    def _run(self, seconds: float) -> None:
        self.compute_s += seconds
        if not self.overlaps:
            self._wait_for_all()

    def _wait_for_gather(self, of: int) -> None:
        self.compute_s = max(self.compute_s, self._ready_s.get(of, 0.0))

    def _wait_for_reduce_scatter(self) -> None:
        self.compute_s = max(self.compute_s, self._scattered_s)

    def _communicate(self, event: Event, micro_batch: int, may_start_s: float) -> float:
        link = COLLECTIVES[event.kind].link
        start_s = max(self.communicators_s[link], may_start_s)
        end_s = self.communicators_s[link] = start_s + self.durations.collectives_s[event.kind][event.of]
        self._note_reduced(event, end_s)
        if not self.overlaps or event.kind in self.waits_for:
            self._wait_for_all()
        if self.keeps_intervals:
            self._keep(COMMUNICATION, event, micro_batch, start_s, end_s)
        return end_s

    def _note_reduced(self, event: Event, end_s: float) -> None:
        if event.kind not in _COMPLETING:
            return
        if event.of in self.durations.copied_out_s:
            end_s = max(end_s, self._copied_out_s) + self.durations.copied_out_s[event.of]
            self._copied_out_s = end_s
        if event.of in self.durations.updates:
            self._reduced_s[event.of] = end_s

    def _wait_for_all(self) -> None:
        """Lets nothing begin before everything issued so far is done."""
        self.compute_s = self.now_s
        for link in self.communicators_s:
            self.communicators_s[link] = self.compute_s

    def _keep(self, resource: str, event: Event, micro_batch: int, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.intervals.append(Interval(resource, event, micro_batch, start_s, end_s))


def _continued(sums_s: Sequence[float], num_micro_batches: int) -> float:
    """The last sum after so many micro-batches, of which those between the first and the last are alike."""
    num_more = num_micro_batches - (len(sums_s) - 1)
    return sums_s[-1] + (num_more * (sums_s[-2] - sums_s[-3]) if num_more else 0.0)
