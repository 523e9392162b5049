"""Seconds of one optimizer step, without its memory: for a search that asks for many choices of modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import Rerun
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost import block_s, copied_s, more_optimizer_s, optimizer_s
from lightning_osdp.engine import DEFAULT, FSDP2, MOST_SIMULATED, Event
from lightning_osdp.engine.schedule import Kind
from lightning_osdp.simulation.step import durations_of, timeline_of
from lightning_osdp.simulation.timeline import Durations

_TIMELESS = frozenset({"zero", "rerun", "linger", "free", "release", "retain"})
"""Kinds of events that take no time, and that nothing waits for."""

_IN_NODE: Mapping[str, tuple[Kind, ...]] = {"gather": ("gather_in_node",), "reduce": ("reduce_in_node", "all_reduce")}
"""Kind of a collective over all ranks -> what takes its place where a unit is in the node."""

_REDUCTIONS = frozenset({"reduce", "reduce in node", "scatter in node", "accumulate"})
"""Classes of what is done with a unit's gradients: one of these, see `_absent`."""


class StepTime(NamedTuple):
    """What was found of one choice of modes."""

    time_s: float
    stalls_s: Mapping[int, float]
    """Unit -> seconds for which computing waits for it in the last backward."""


class StepClock:
    """The time of `simulate_step` for any modes, with what no mode changes worked out once.

    All blocks of the step keep what they save. A unit's events depend on its own mode alone: one that is kept does
    without some of those of one that is freed.
    """

    def __init__(self, step: Step, engine: FSDP2 = DEFAULT) -> None:
        self.profile, self.cluster, self.engine = step.profile, step.cluster, engine
        self.num_micro_batches = step.workload.num_micro_batches
        self.optimizer_s = optimizer_s(step.profile, step.cluster)
        """Where all units are sharded over all ranks; no modes take less."""
        self.durations = durations_of(step, engine)
        self.units, self.micro_batch_size = step.units, step.workload.micro_batch_size
        self.events = _classed(
            step.units,
            len(step.profile.segments),
            tuple(step.profile.rerun.items()),
            engine,
            has_nodes=step.cluster.has_nodes,
        )
        """Events of a micro-batch in which every unit is freed, each with its class: see `_absent`."""
        self._joined, self._places = _joined(self.events, len(step.profile.segments))
        self._joined_s = self.durations._replace(
            forward_s=_added(self.durations.forward_s, self._places["forward"]),
            backward_s=_added(self.durations.backward_s, self._places["backward"]),
        )

    def step(self, modes: Sequence[ShardingMode]) -> StepTime:
        """One optimizer step with these modes, one per unit."""
        timeline = timeline_of(self._with_activations(modes), self.cluster, self.engine)
        num_simulated = min(MOST_SIMULATED, self.num_micro_batches)
        different, before = set(modes), None
        for index in range(num_simulated):
            classes = {
                mode: _absent(mode, is_first=index == 0, is_last=index == num_simulated - 1) for mode in different
            }
            absent = [classes[mode] for mode in modes]
            if absent == before:
                timeline.repeat()
            else:
                timeline.read_all(
                    [event for event, kind in self._joined if kind is None or kind not in absent[event[1]]]
                )
            before = absent
        update_s = self.optimizer_s + sum(
            more_optimizer_s(self.profile, self.cluster, unit, mode)
            for unit, mode in zip(self.units, modes, strict=True)
            if mode.sharded_over != "all"
        )
        return StepTime(timeline.total_s(self.num_micro_batches) + update_s, timeline.stalls_s)

    def _with_activations(self, modes: Sequence[ShardingMode]) -> Durations:
        """Seconds of every event where blocks do with what they save as the modes say."""
        if all(mode.activations == "keep" for mode in modes):
            return self._joined_s
        forward_s, backward_s = list(self._joined_s.forward_s), list(self._joined_s.backward_s)
        for unit, mode in zip(self.units, modes, strict=True):
            around = (unit.block, mode.activations, self.cluster, self.micro_batch_size)
            of_forward_s = copied_s(*around)
            forward_s[self._places["forward"][unit.last]] += of_forward_s
            backward_s[self._places["backward"][unit.last]] += block_s(*around) - of_forward_s
        return self._joined_s._replace(forward_s=forward_s, backward_s=backward_s)


@cache
def _absent(mode: ShardingMode, *, is_first: bool, is_last: bool) -> frozenset[str]:
    """Classes of events that a unit in this mode does without in such a micro-batch.

    ``freed``: those of a unit that is freed in forward, alone, and ``again`` its gathers; ``gather``, ``reduce`` and,
    in its place, ``accumulate``: those of all units; ``gather between``: gathers between two calls in backward. Gathers
    and reductions come twice: over all ranks, and ``in node``; ``scatter in node`` are those without an all-reduce
    between nodes.
    """
    classes = {"freed", "again", "again in node"} if mode.resident else set()
    classes.add("again" if mode.regathers_over == "node" else "again in node")
    elsewhere = "" if mode.sharded_over == "node" else " in node"
    classes |= {f"{each}{elsewhere}" for each in ("gather", "gather between")}
    waits = mode.sync == "last" and not is_last
    if waits:
        reduces = "accumulate"
    elif mode.sharded_over == "all":
        reduces = "reduce"
    else:
        reduces = "reduce in node" if mode.sync != "node" or is_last else "scatter in node"
    classes |= _REDUCTIONS - {reduces}
    if waits and mode.resident:
        classes |= {"gather between", "gather between in node"}
    if mode.sync == "last" and mode.resident and not is_first:
        classes |= {"gather", "gather in node"}
    return frozenset(classes)


@lru_cache(maxsize=128)
def _classed(
    units: tuple[UnitProfile, ...],
    num_segments: int,
    rerun: tuple[tuple[str, Rerun], ...],
    engine: FSDP2,
    *,
    has_nodes: bool,
) -> tuple[tuple[Event, str | None], ...]:
    """Events of freed units; those of kept ones are some of these, in the same order.

    Each ``reduce`` is followed by the ``accumulate`` that may take its place; and where there are nodes, each gather
    and reduction by what takes its place inside of them.
    """
    (freed,), (kept,) = (
        engine.micro_batches(
            units,
            [is_kept] * len(units),
            [False] * len(units),
            num_segments=num_segments,
            rerun=dict(rerun),
        )
        for is_kept in (False, True)
    )
    left = (event for event in kept if event.kind not in _TIMELESS)
    expected = next(left, None)
    classed: list[tuple[Event, str | None]] = []
    is_in_backward, flattened = False, set[int]()
    for event in freed:
        kind, of = event
        if kind in _TIMELESS:
            continue
        if event != expected:
            own: str | None = "again" if kind == "gather" else "freed"
        elif kind == "gather" and is_in_backward and of not in flattened:
            own = "gather between"
        else:
            own = kind if kind in {"gather", "reduce"} else None
        classed.append((event, own))
        if has_nodes:
            classed += [(Event(each, of), f"{own} in node") for each in _IN_NODE.get(kind, ())]
        if event == expected:
            expected = next(left, None)
            is_in_backward = is_in_backward or event == Event("forward", num_segments - 1)
            if kind == "flatten":
                flattened.add(of)
            if kind == "reduce":
                classed.append((Event("accumulate", of), "accumulate"))
                if has_nodes:
                    classed.append((Event("scatter_in_node", of), "scatter in node"))
    return tuple(classed)


def _joined(
    events: Sequence[tuple[Event, str | None]], num_segments: int
) -> tuple[list[tuple[Event, str | None]], Mapping[str, Sequence[int]]]:
    """Events in which segments that are run one after the other are one, and the segment that each is then part of.

    Nothing can begin between them: of a unit that is a whole block, most events are such segments.
    """
    places = {kind: [*range(num_segments)] for kind in ("forward", "backward")}
    joined: list[tuple[Event, str | None]] = []
    for event, own in events:
        before = joined[-1][0] if joined else None
        if before is not None and event.kind == before.kind and event.kind in places:
            places[event.kind][event.of] = before.of
        else:
            joined.append((event, own))
    return joined, places


def _added(seconds: Sequence[float], places: Sequence[int]) -> list[float]:
    """Seconds of segments, each added to those of the segment that it is part of."""
    added_s = [0.0] * len(seconds)
    for place, each_s in zip(places, seconds, strict=True):
        added_s[place] += each_s
    return added_s
