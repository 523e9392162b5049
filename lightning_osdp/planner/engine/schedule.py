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
- A shard on the host is copied to the device right before each all-gather of it, in the stream of what that sends.
- Resident units are gathered before the first step of all, and are there from then on. Lists pass over them: the unit
  that comes next of all others is gathered ahead.
- A unit that moves activations is called once and never gathered, has no list, and lists pass over it. Before and after
  its operators run, forward and backward, activations or gradients are exchanged; where it is sharded in the node,
  gradients of its shard are then summed between nodes, in each micro-batch. No block that recomputes is around.

Lists hold at every call, and a unit that forward calls more than once has none, or it would gather what is not needed
any more. For that reason a unit that is run again gathers none ahead that backward has come to.

References:
    torch/distributed/fsdp/_fully_shard/_fsdp_state.py (``_pre_forward``, ``_pre_backward``,
    ``_root_post_backward_final_callback``), _fsdp_param_group.py (``unshard``, ``post_backward``). [Read, and seen in
    torch 2.13 on two to four gloo ranks.]
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

from lightning_osdp.core.profile import Rerun
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.engine.effects import Effects
from lightning_osdp.planner.engine.events import EXCHANGES, EXCHANGES_OVER, GATHER_OVER, Event, Kind, event

MOST_SIMULATED = 3
"""Micro-batches that are simulated one by one: first, steady, last. Further ones are like the steady one."""


class Turn(NamedTuple):
    """One turn of the host, which comes whatever the effects of units are; `Host` has a method for each kind."""

    does: str
    of: int
    """Unit or segment; of what is gathered ahead, a place in an order of units, see `Turns`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Turns:
    """Turns of a micro-batch, of which effects say what events come of them."""

    turns: tuple[Turn, ...]
    order: tuple[int, ...]
    """Units as forward leaves them: backward gathers ahead what is before a place."""
    entered: tuple[int, ...]
    """Units as forward comes to them, outer ones first: forward gathers ahead what is at a place or behind."""
    gathered_before: frozenset[int]
    """Units that backward comes to and reads, and so gathers ahead."""
    reached_at: Mapping[int, int]
    """Unit -> the turn at which backward comes to the unit: later ones do not gather it ahead again."""
    inside: tuple[frozenset[int], ...]
    """By turn that gathers ahead while a block is run again, units inside of it that backward has not come to."""
    read: frozenset[int]
    """Units that backward gathers where it comes to them."""
    starting: Mapping[int, Sequence[int]]
    """Turn that gathers ahead in forward -> units that begin with its segment."""
    places: Mapping[str, Sequence[int]]
    """Segment that each segment is part of, by kind of event: segments between which nothing may begin are one."""


@lru_cache(maxsize=128)
def turns_of(
    units: tuple[UnitProfile, ...],
    num_segments: int,
    rerun: tuple[tuple[str, Rerun], ...],
    *,
    merges_calls: bool,
    backward_prefetch: str,
    forward_prefetch: bool,
) -> Turns:
    """Turns of a micro-batch.

    Args:
        units: root first, if any, then in forward order.
        num_segments: of the model, the loss included.
        rerun: blocks that recompute.
        merges_calls: whether a unit that forward calls again is taken as gathered from its first call to its last.
        backward_prefetch: of `FSDP2`.
        forward_prefetch: likewise.
    """
    return _Walk(
        units=units,
        num_segments=num_segments,
        rerun=rerun,
        merges_calls=merges_calls,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
    ).walked()


_SILENT = frozenset({"free_in_forward", "free", "leave", "release", "rerun", "linger", "zero"})
"""Turns that take no time, and in which nothing begins."""


@dataclass(kw_only=True, eq=False)
class _Walk:
    """The host on its way through a micro-batch, with its turns so far."""

    units: Sequence[UnitProfile]
    num_segments: int
    rerun: tuple[tuple[str, Rerun], ...]
    merges_calls: bool
    backward_prefetch: str
    forward_prefetch: bool

    def __post_init__(self) -> None:
        units = self.units
        self.turns: list[Turn] = []
        self.inside: list[frozenset[int]] = []
        self.starting: dict[int, Sequence[int]] = {}
        self.order = leaving_order(units)
        self.place = {unit: place for place, unit in enumerate(self.order)}
        self.root = [index for index, unit in enumerate(units) if unit.is_root]
        self.entered = sorted(self.order, key=lambda unit: (units[unit].first, unit))
        self.is_called_once = [len(unit.calls) == 1 for unit in units]
        self.starts: list[list[int]] = [[] for _ in range(self.num_segments)]
        self.ends: list[list[int]] = [[] for _ in range(self.num_segments)]
        for unit in self.order:
            for first, last in units[unit].calls:
                self.starts[first].append(unit)
                self.ends[last].append(unit)
        self.blocks = _blocks(tuple(units), self.rerun)
        """Last segment of a block that recomputes -> its first one, the units inside it, and whether it is early."""
        again = frozenset[int]().union(*(inside for _, inside, _ in self.blocks.values()))
        self.read = {unit for unit in range(len(units)) if units[unit].is_read or unit in again}
        self.called: set[int] = set()  # by forward
        self.reached_at: dict[int, int] = {}
        self._plan_backward()

    def _plan_backward(self) -> None:
        self.trained_from = self.units[0].trained_from
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

    def walked(self) -> Turns:
        """Turns of forward, loss and backward."""
        self.forward()
        self.backward()
        return Turns(
            turns=tuple(self.turns),
            order=self.order,
            entered=tuple(self.entered),
            gathered_before=frozenset(self.comes_back & self.read),
            reached_at=self.reached_at,
            inside=tuple(self.inside),
            read=frozenset(self.read),
            starting=self.starting,
            places=self._places(),
        )

    def note(self, does: str, of: int) -> None:
        """Appends a turn."""
        self.turns.append(Turn(does, of))

    def forward(self) -> None:
        """Appends the turns of forward, the loss included."""
        for unit in self.root:
            self.note("need", unit)
        for segment in range(self.num_segments):
            for unit in sorted(self.starts[segment]):
                if unit in self.called:
                    self.note("free_in_forward", unit)  # a module may be called twice in one segment
                self.called.add(unit)
                self.note("need", unit)
            if (place := self._ahead(segment)) is not None:
                self.note("gather_ahead", place)
            self.note("forward", segment)
            for unit in sorted(set(self.ends[segment]), key=self.place.__getitem__):
                if not self.merges_calls or self.units[unit].last == segment:
                    self.note("free_in_forward", unit)
        self.note("zero", 0)

    def _ahead(self, segment: int) -> int | None:
        """Place in `entered` from which a unit is gathered ahead where this segment begins, if units begin with it."""
        if not self.forward_prefetch or not self.starts[segment]:
            return None
        self.starting[len(self.turns)] = self.starts[segment]
        return bisect_right(self.entered, segment, key=lambda unit: self.units[unit].first)

    def backward(self) -> None:
        """Appends the turns of backward."""
        if self.backward_prefetch == "pre":
            self.note("gather_before", len(self.order))
        for segment in range(self.num_segments - 1, -1, -1):
            if segment >= self.trained_from:
                self.come_to(segment)
            self.note("backward", segment)
            for unit, is_through in self.returns[segment]:
                if is_through:
                    self.note("reduce", unit)
                elif not self.merges_calls:
                    self.note("leave", unit)
            self.note("release", segment)
        for unit in (*self.root, *self.at_the_end):
            self.note("reduce", unit)

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
        if self.merges_calls and unit in self.reached_at:
            self.note("free", unit)  # and gathered again: what that takes is seen, though it has been there meanwhile
        self.reached_at.setdefault(unit, len(self.turns))
        self.note("reach", unit)
        if self.backward_prefetch == "pre" and self.is_called_once[unit]:
            self.note("gather_before", self.place[unit])
        for _ in range(num_calls - 1 if unit in self.read else 0):
            self.note("leave", unit)
            self.note("need", unit)

    def run_again(self, first: int, last: int, inside: frozenset[int]) -> None:
        """Forward of a block that recomputes, with these units inside; none where ``first`` is behind ``last``."""
        for segment in range(first, last + 1):
            for unit in sorted(inside.intersection(self.starts[segment])):
                self.note("need", unit)
                self.note("linger", unit)
            if (place := self._ahead(segment)) is not None:
                self.inside += [frozenset()] * (len(self.turns) - len(self.inside))
                self.inside.append(inside.difference(self.reached_at))
                self.note("gather_ahead_inside", place)
            self.note("rerun", segment)

    def _places(self) -> dict[str, list[int]]:
        places = {kind: [*range(self.num_segments)] for kind in ("forward", "backward")}
        last: Turn | None = None  # of a segment, where nothing may have begun since
        for turn in self.turns:
            if turn.does not in places:
                last = last if turn.does in _SILENT else None
            elif last is not None and last.does == turn.does:
                places[turn.does][turn.of] = last.of
            else:
                last = turn
        return places


@dataclass(kw_only=True, eq=False)
class Host:
    """The host as it goes through a step: which units it has gathered, and the events so far."""

    units: Sequence[UnitProfile]
    """Root first, if any, then in forward order."""
    turns: Turns
    effects: Sequence[Effects]
    """Effects of each unit's treatment."""
    late_forward: Collection[str] = ()
    """Units that forward does not gather ahead, by name."""
    late_backward: Collection[str] = ()

    def __post_init__(self) -> None:
        self.passed_over = {unit for unit, effects in enumerate(self.effects) if effects.is_passed_over}
        """Units that are there without a gather of this step, or whose activations move."""
        self.gathered = {unit for unit, effects in enumerate(self.effects) if effects.is_resident}
        self.retained: set[int] = set()
        """Units of which there is a shard in each node."""
        self.before = self._not_passed_over(self.turns.order)
        """The last unit before each place of `Turns.order` that is not passed over."""
        self.behind = self._not_passed_over(self.turns.entered[::-1])[::-1]
        """The first unit at each place of `Turns.entered`, or behind it, that is not passed over."""
        self._methods: dict[str, Callable[[int], None]] = {does: getattr(self, does) for does in _METHODS}
        self._methods |= {kind: partial(self.note, kind) for kind in _NOTED}

    def _not_passed_over(self, order: Iterable[int]) -> list[int | None]:
        """The latest of these units that is not passed over, by the number of units before."""
        found: list[int | None] = [None]
        for unit in order:
            found.append(found[-1] if unit in self.passed_over else unit)
        return found

    def micro_batch(self, *, is_first: bool, is_last: bool) -> list[Event]:
        """Events of forward, loss and backward in one more micro-batch."""
        self.is_first, self.is_last = is_first, is_last
        self.events: list[Event] = []
        self.turn_of: list[int] = []
        """Turn of each event, by number. Turns do not depend on the effects."""
        for turn, (does, of) in enumerate(self.turns.turns):
            self.turn = turn
            self._methods[does](of)
        return self.events

    def note(self, kind: Kind, of: int) -> None:
        """Appends an event."""
        self.events.append(event(kind, of))
        self.turn_of.append(self.turn)

    def exchange(self, kind: Kind, unit: int) -> None:
        """Has the ranks that a unit is sharded over exchange what it works on."""
        self.note(EXCHANGES_OVER[self.effects[unit].sharded_over][EXCHANGES.index(kind)], unit)

    def gather(self, unit: int) -> None:
        """Gathers a unit, unless it is unsharded."""
        if unit not in self.gathered:
            self.gathered.add(unit)
            effects = self.effects[unit]
            if effects.shard_on_host and unit not in self.retained:
                self.note("copy_in", unit)
            self.note(GATHER_OVER[effects.left_over if unit in self.retained else effects.sharded_over], unit)

    def need(self, unit: int) -> None:
        """Gathers a unit and waits for it, or has ranks exchange what it works on: the next event computes with it."""
        if self.effects[unit].exchanges:
            self.exchange("exchange_inputs", unit)
            return
        self.gather(unit)
        self.note("await", unit)
        self.retained.discard(unit)

    def reach(self, unit: int) -> None:
        """Backward comes to what a unit has returned."""
        if self.effects[unit].exchanges:
            self.exchange("exchange_output_gradients", unit)
        elif unit in self.turns.read:
            self.need(unit)

    def gather_ahead(self, place: int) -> None:
        """Gathers the unit ahead that forward comes to next, unless what begins here is called more than once."""
        unit, starting = self.behind[place], self.turns.starting[self.turn]
        leading = max((each for each in starting if not self.effects[each].exchanges), default=None)
        if unit is None or leading is None or len(self.units[leading].calls) > 1:
            return
        if self.units[unit].name not in self.late_forward:
            self.gather(unit)

    def gather_ahead_inside(self, place: int) -> None:
        """Gathers it while a block is run again, if it is inside of the block."""
        if self.behind[place] in self.turns.inside[self.turn]:
            self.gather_ahead(place)

    def gather_before(self, place: int) -> None:
        """Gathers the unit before this place ahead, as backward's prefetch."""
        unit, order = self.before[place], self.turns.order
        if place < len(order) and self.effects[order[place]].exchanges:
            return
        if unit is None or unit not in self.turns.gathered_before or self.units[unit].name in self.late_backward:
            return
        if self.turns.reached_at[unit] > self.turn:
            self.gather(unit)

    def free(self, unit: int) -> None:
        """Leaves a unit's shard alone."""
        self.gathered.discard(unit)
        self.note("free", unit)

    def free_in_forward(self, unit: int) -> None:
        """Frees a unit after forward, but for a larger shard where forward leaves one; a kept unit stays."""
        if self.effects[unit].exchanges:
            self.exchange("exchange_outputs", unit)
        if self.effects[unit].is_kept or unit not in self.gathered:
            return
        if self.effects[unit].leaves_shard:
            self.retained.add(unit)
            self.note("retain", unit)
        self.free(unit)

    def zero(self, _: int) -> None:
        """Lightning drops the gradients of the step before."""
        if self.is_first:
            self.note("zero", 0)

    def leave(self, unit: int) -> None:
        """Ends backward of one call of a unit."""
        if unit not in self.passed_over and (self.is_last or not self.effects[unit].stays):
            self.free(unit)
            self.retained.discard(unit)

    def reduce(self, unit: int) -> None:
        """Ends backward of a unit, whose gradients are then reduced or kept, or those of its inputs exchanged."""
        effects = self.effects[unit]
        if effects.exchanges:
            self.exchange("exchange_input_gradients", unit)
        elif not effects.is_resident:
            self.note("flatten", unit)
        elif self.is_last or self.units[unit].gradient_bytes:
            self.note("stay", unit)
        self.leave(unit)
        for kind in effects.reductions[self.is_last] if self.units[unit].gradient_bytes else ():
            self.note(kind, unit)


_METHODS = (
    *("need", "reach", "gather_ahead", "gather_ahead_inside", "gather_before"),
    *("free", "free_in_forward", "zero", "leave", "reduce"),
)
_NOTED: tuple[Kind, ...] = ("forward", "rerun", "linger", "backward", "release")
"""Turns that are events, whatever the effects."""


def leaving_order(units: Sequence[UnitProfile]) -> tuple[int, ...]:
    """Units in the order in which forward leaves them for good, inner ones first; without the root."""
    inner = [index for index, unit in enumerate(units) if not unit.is_root]
    return tuple(sorted(inner, key=lambda index: (units[index].last, -index)))


@lru_cache(maxsize=128)
def _blocks(
    units: tuple[UnitProfile, ...], rerun: tuple[tuple[str, Rerun], ...]
) -> dict[int, tuple[int, frozenset[int], bool]]:
    """Blocks that recompute, as `_Walk.blocks` has them."""

    def inside(modules: Collection[str]) -> frozenset[int]:
        return frozenset(index for index, unit in enumerate(units) if unit.name in modules)

    return {last: (first, inside(modules), is_early) for _, ((first, last), is_early, modules) in rerun}
