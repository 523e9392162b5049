"""Events of ``fully_shard`` in one optimizer step, in the order in which the host issues them.

With explicit lists of modules to prefetch, one for each unit:

- Forward gathers a unit at each call of its module and frees it after, unless its mode keeps it. The root is gathered
  first and kept to the end of backward. ``forward_prefetch`` gathers the next unit once a unit is copied out, but
  none once the root is: a step may begin with writes to weights, which what is gathered before them has not.
- Backward gathers a unit when it reaches what a call of it has returned, and frees it when the gradients of that call's
  inputs are there: a unit that forward calls twice is gathered twice in backward, unless it is kept and this is the
  first time. Its gradients are reduced at its first call; autograd holds them until then.
- Prefetching ("pre") gathers the unit that forward left before, once backward has come to a unit; but none that
  backward does not come to, as everything up to it is frozen.
- Both are lists, and leave out units that are to be gathered late: only when their own turn comes.
- Where the inputs of a unit's first call need no gradient, nothing tells that backward is through with it: it is freed
  and reduced at the end of backward, after the root, in the order of ``named_modules()`` (here: of forward). So are
  units that backward does not come to.
- A block that recomputes runs its forward again when backward reaches it. Units inside it are gathered for that, and
  stay gathered until backward is through with them.
- Of a unit that is to be gathered again inside of nodes, forward leaves a shard in each node when it frees it, from
  which the next all-gather is. In backward nothing is left of it.
- A unit that is sharded in the node is gathered there, and reduced there; what a rank gets is then all-reduced between
  nodes, or in the last micro-batch the sum of what all have left.
- A unit that accumulates does not reduce its gradients until the last micro-batch; where its mode keeps it gathered, it
  stays so to the end of the last backward. It must be called once (`FSDP2.may_wait`).
- A unit of which backward reads no weights is not gathered there, unless it is inside a block that is run again.
- A frozen unit reduces nothing, and waits for no reduce-scatter before it.
- Resident units are gathered before the first step of all, the largest first, and are there from then on. Lists pass
  over them: the unit that comes next of all others is gathered ahead.
- A unit that moves activations is called once and never gathered, has no list, and lists pass over it. Before and after
  its operators run, forward and backward, activations or gradients are exchanged. No block that recomputes is around.

Lists hold at every call, and a unit that forward calls more than once has none, or it would gather what is not needed
any more. For that reason a unit that is run again gathers none ahead that backward has come to.

References:
    torch/distributed/fsdp/_fully_shard/_fsdp_state.py (``_pre_forward``, ``_pre_backward``,
    ``_root_post_backward_final_callback``), _fsdp_param_group.py (``unshard``, ``post_backward``). [Read, and seen in
    torch 2.13 on two to four gloo ranks.]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_osdp.core.profile import Rerun
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine.effects import Effects
from lightning_osdp.engine.events import GATHER_OVER, Event, Kind, event

MOST_SIMULATED = 3
"""Micro-batches that are simulated one by one: first, steady, last. Further ones are like the steady one."""


@dataclass(kw_only=True, eq=False)
class Host:
    """The host as it goes through a step: which units it has gathered, and the events so far."""

    units: Sequence[UnitProfile]
    """Root first, if any, then in forward order."""
    effects: Sequence[Effects]
    """Effects of each unit's treatment."""
    num_segments: int
    """Number of segments of the model, the loss included."""
    rerun: Mapping[str, Rerun]
    """Blocks that recompute."""
    merges_calls: bool = False
    """True if a unit that forward calls again is taken as gathered from its first call to its last."""
    backward_prefetch: str
    forward_prefetch: bool
    late_forward: Collection[str] = ()
    """Units that forward does not gather ahead, by name."""
    late_backward: Collection[str] = ()

    def __post_init__(self) -> None:
        units = self.units
        self.passed_over = {unit for unit, effects in enumerate(self.effects) if effects.is_passed_over}
        """Units that are there without a gather of this step, or whose activations move."""
        self.gathered = {unit for unit, effects in enumerate(self.effects) if effects.is_resident}
        self.retained: set[int] = set()
        """Units of which there is a shard in each node."""
        self.order = leaving_order(units)
        self.place = {unit: place for place, unit in enumerate(self.order)}
        self.root = [index for index, unit in enumerate(units) if unit.is_root]
        self.is_called_once = [len(unit.calls) == 1 for unit in units]
        self.starts: list[list[int]] = [[] for _ in range(self.num_segments)]
        self.ends: list[list[int]] = [[] for _ in range(self.num_segments)]
        for unit in self.order:
            for first, last in units[unit].calls:
                self.starts[first].append(unit)
                self.ends[last].append(unit)
        self.leaves = self.ends
        """Units that forward is through with, by segment."""
        if self.merges_calls:
            self.leaves = [[unit for unit in ends if units[unit].last == i] for i, ends in enumerate(self.ends)]
        self.blocks = _blocks(tuple(units), tuple(self.rerun.items()))
        """Last segment of a block that recomputes -> its first one, the units inside it, and whether it is early."""
        self.ahead: list[list[int]] = [[] for _ in range(self.num_segments)]
        if self.forward_prefetch:
            self.ahead = self._gathered_ahead()
        for segment, starting in enumerate(self.starts):
            is_late = any(units[unit].name in self.late_forward for unit in self.ahead[segment])
            if self.ahead[segment] and (is_late or not self._leads_on(segment, starting)):
                self.ahead[segment] = []
        again = frozenset[int]().union(*(inside for _, inside, _ in self.blocks.values()))
        self.read = {unit for unit in range(len(units)) if units[unit].is_read or unit in again}
        self._plan_backward()

    def _plan_backward(self) -> None:
        self.trained_from = self.units[0].trained_from
        self.before: list[int | None] = [None]
        """The unit that forward left last, without those passed over, before the one at each place of `order`; and of
        all."""
        for unit in self.order:
            self.before.append(self.before[-1] if unit in self.passed_over else unit)
        self.returns: list[list[tuple[int, bool]]] = [[] for _ in range(self.num_segments)]
        """Units of which backward leaves a call, by segment, each with True where that is its last call."""
        self.at_the_end: list[int] = []
        """Units that are freed and reduced at the end of backward, in order."""
        self.comes_back: set[int] = set()
        """Units that backward comes to."""
        for unit in self.order:
            # calls in one segment have no backward between them
            reached = [first for first, last in dict.fromkeys(self.units[unit].calls) if last >= self.trained_from]
            if reached:
                self.comes_back.add(unit)
            if not reached or reached[0] <= self.trained_from:
                self.at_the_end.append(unit)
            else:
                self.returns[reached[0]].append((unit, True))
            for first in reached[1:]:
                self.returns[first].append((unit, False))
        self.at_the_end.sort()
        late = {unit for unit in self.order if self.units[unit].name in self.late_backward}
        self.prefetched = (self.comes_back & self.read) - late
        """Units that backward gathers ahead where they come next."""

    def _gathered_ahead(self) -> list[list[int]]:
        """Units that ``forward_prefetch`` has gathered by each segment: the next one of forward."""
        first_at: dict[int, int] = {}  # segment -> the outermost unit that begins with it and may not be there yet
        for index in range(len(self.units) - 1, -1, -1):
            if not self.units[index].is_root and index not in self.passed_over:
                first_at[self.units[index].first] = index
        ahead: list[list[int]] = []
        following: list[int] = []
        for segment in range(self.num_segments - 1, -1, -1):
            ahead.append(following)
            following = [first_at[segment]] if segment in first_at else following
        return ahead[::-1]

    def _leads_on(self, segment: int, starting: Sequence[int]) -> bool:
        """Tells if a unit that begins with this segment prefetches in forward."""
        leading = [unit for unit in starting if not self.effects[unit].exchanges]
        return bool(leading) and self.is_called_once[max(leading)]

    def micro_batch(self, *, is_first: bool, is_last: bool) -> list[Event]:
        """Events of forward, loss and backward in one more micro-batch."""
        self.is_first, self.is_last = is_first, is_last
        self.events: list[Event] = []
        self.turns: list[int] = []
        """Turn of the host in which each event was issued. Turns do not depend on the effects."""
        self.turn = 0
        self.called: set[int] = set()  # by forward
        self.reached: set[int] = set()  # by backward: none of them is prefetched again
        self.forward()
        self.backward()
        return self.events

    def note(self, kind: Kind, of: int) -> None:
        """Appends an event."""
        self.events.append(event(kind, of))
        self.turns.append(self.turn)

    def gather(self, unit: int) -> None:
        """Gathers a unit, unless it is unsharded."""
        self.turn += 1
        if unit not in self.gathered:
            self.gathered.add(unit)
            effects = self.effects[unit]
            self.note(GATHER_OVER[effects.left_over if unit in self.retained else effects.sharded_over], unit)

    def need(self, unit: int, exchange: Kind = "exchange_inputs") -> None:
        """Gathers a unit and waits for it, or has ranks exchange what it works on: the next event computes with it."""
        if self.effects[unit].exchanges:
            self.run(exchange, unit)
            return
        self.gather(unit)
        self.note("await", unit)
        self.retained.discard(unit)

    def free(self, unit: int) -> None:
        """Leaves a unit's shard alone."""
        self.gathered.discard(unit)
        self.note("free", unit)

    def free_in_forward(self, unit: int) -> None:
        """Frees a unit after forward, but for a larger shard where forward leaves one; a kept unit stays."""
        self.turn += 1
        if self.effects[unit].exchanges:
            self.note("exchange_outputs", unit)
        if self.effects[unit].is_kept or unit not in self.gathered:
            return
        if self.effects[unit].leaves_shard:
            self.retained.add(unit)
            self.note("retain", unit)
        self.free(unit)

    def run(self, kind: Kind, of: int) -> None:
        """Appends an event that comes whatever the effects."""
        self.turn += 1
        self.note(kind, of)

    def forward(self) -> None:
        """Appends the events of forward, the loss included."""
        for unit in self.root:
            self.need(unit)
        for segment in range(self.num_segments):
            for unit in sorted(self.starts[segment]):
                if unit in self.called:
                    self.free_in_forward(unit)  # a module may be called twice in one segment
                self.called.add(unit)
                self.need(unit)
            for unit in self.ahead[segment]:
                self.gather(unit)
            self.run("forward", segment)
            for unit in sorted(set(self.leaves[segment]), key=self.place.__getitem__):
                self.free_in_forward(unit)
        if self.is_first:
            self.run("zero", 0)

    def backward(self) -> None:
        """Appends the events of backward."""
        if self.backward_prefetch == "pre":
            self.gather_before(len(self.order))
        for segment in range(self.num_segments - 1, -1, -1):
            if segment >= self.trained_from:
                self.come_to(segment)
            self.run("backward", segment)
            for unit, is_through in self.returns[segment]:
                if is_through:
                    self.reduce(unit)
                elif not self.merges_calls:
                    self.leave(unit)
            self.run("release", segment)
        for unit in (*self.root, *self.at_the_end):
            self.reduce(unit)

    def gather_before(self, place: int) -> None:
        """Gathers the unit before this place ahead, as backward's prefetch."""
        unit = self.before[place]
        if unit is not None and unit in self.prefetched and unit not in self.reached:
            self.gather(unit)

    def come_to(self, segment: int) -> None:
        """Backward reaches the outputs of this segment: units whose calls end with it, and blocks to run again."""
        if not self.ends[segment] and segment not in self.blocks:
            return
        first, inside, is_early = self.blocks.get(segment, (segment + 1, frozenset[int](), False))
        num_calls = Counter(self.ends[segment])
        ends = sorted(num_calls, key=self.place.__getitem__, reverse=True)
        late = inside.intersection(ends) if is_early else frozenset()
        for unit in ends:
            if unit not in late:
                self.reach(unit, num_calls[unit])
        self.run_again(first, segment, inside)
        for unit in ends:
            if unit in late:
                self.reach(unit, num_calls[unit])

    def reach(self, unit: int, num_calls: int) -> None:
        """Backward comes to what a unit has returned at so many calls in one segment."""
        if self.merges_calls and unit in self.reached:
            self.free(unit)  # and gathered again: what that takes is seen, though it has been there meanwhile
        self.reached.add(unit)
        if unit in self.read or self.effects[unit].exchanges:
            self.need(unit, "exchange_output_gradients")
        else:
            self.turn += 1
        if self.backward_prefetch == "pre" and self.is_called_once[unit] and not self.effects[unit].exchanges:
            self.gather_before(self.place[unit])
        for _ in range(num_calls - 1 if unit in self.read else 0):
            self.leave(unit)
            self.need(unit)

    def run_again(self, first: int, last: int, inside: frozenset[int]) -> None:
        """Forward of a block that recomputes, with these units inside; none where ``first`` is behind ``last``."""
        for segment in range(first, last + 1):
            for unit in sorted(inside.intersection(self.starts[segment])):
                self.need(unit)
                self.note("linger", unit)
            for unit in inside.intersection(self.ahead[segment]) - self.reached:
                self.gather(unit)
            self.run("rerun", segment)

    def leave(self, unit: int) -> None:
        """Ends backward of one call of a unit."""
        self.turn += 1
        if unit not in self.passed_over and (self.is_last or not self.effects[unit].stays):
            self.free(unit)
            self.retained.discard(unit)

    def reduce(self, unit: int) -> None:
        """Ends backward of a unit, whose gradients are then reduced or kept, or those of its inputs exchanged."""
        self.run("exchange_input_gradients" if self.effects[unit].exchanges else "flatten", unit)
        self.leave(unit)
        self.turn += 1
        for kind in self.effects[unit].reductions[self.is_last] if self.units[unit].gradient_bytes else ():
            self.note(kind, unit)


def leaving_order(units: Sequence[UnitProfile]) -> tuple[int, ...]:
    """Units in the order in which forward leaves them for good, inner ones first; without the root."""
    inner = [index for index, unit in enumerate(units) if not unit.is_root]
    return tuple(sorted(inner, key=lambda index: (units[index].last, -index)))


@lru_cache(maxsize=128)
def _blocks(
    units: tuple[UnitProfile, ...], rerun: tuple[tuple[str, Rerun], ...]
) -> dict[int, tuple[int, frozenset[int], bool]]:
    """Blocks that recompute, as `Host.blocks` has them."""

    def inside(modules: Collection[str]) -> frozenset[int]:
        return frozenset(index for index, unit in enumerate(units) if unit.name in modules)

    return {last: (first, inside(modules), is_early) for _, ((first, last), is_early, modules) in rerun}
