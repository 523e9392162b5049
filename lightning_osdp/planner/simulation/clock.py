"""Seconds of one optimizer step, without its memory: for a search that asks for many choices of modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.profile import Rerun
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.cost import block_s, copied_s, update_s
from lightning_osdp.planner.engine import (
    DEFAULT,
    FREED,
    FSDP2,
    KEPT,
    MOST_SIMULATED,
    Effects,
    Event,
    effects_in,
    effects_of,
)
from lightning_osdp.planner.simulation.step import durations_of, timeline_of, with_host
from lightning_osdp.planner.simulation.timeline import Durations

_TIMELESS = frozenset({"zero", "rerun", "linger", "free", "release", "retain"})
"""Kinds of events that take no time, and that nothing waits for."""

_SEGMENTS = ("forward", "backward")
"""Kinds of events that run a segment."""


@dataclass(frozen=True, eq=False)
class _Run:
    """A step in which all units are treated alike."""

    micro_batches: tuple[Mapping[int, tuple[Event, ...]], ...]
    """Events of each that take time, by turn of the host."""


_Places = Mapping[str, Sequence[int]]
"""Segment that each segment is part of, by kind of event."""

_Turns = list[tuple[int, tuple[tuple[Event, ...], ...]]]
"""Unit that each turn of the host is about, -1 for a segment, and its events by number of the effects."""


class StepTime(NamedTuple):
    """Seconds of one choice of modes."""

    time_s: float
    stalls_s: Mapping[int, float]
    """Unit -> seconds for which computing waits for it in the last backward."""


class StepClock:
    """The time of `simulate_step` for any modes, with what no mode changes worked out once.

    All blocks of the step keep what they save. A unit's events depend on its own mode alone, and the host takes the
    same turns in all modes: so those of any mix are taken from steps in which all units are treated alike. Where units
    are resident or move activations, others are gathered ahead in their place: such a step is gone through by itself.
    ``host_rent_s_per_byte`` as of `cost.more_optimizer_s`.
    """

    def __init__(self, step: Step, engine: FSDP2 = DEFAULT, *, host_rent_s_per_byte: float = 0.0) -> None:
        self.profile, self.cluster, self.engine = step.profile, step.cluster, engine
        self.num_micro_batches = step.workload.num_micro_batches
        self.durations = durations_of(step, engine)
        self.units, self._step, self._host_rent_s_per_byte = step.units, step, host_rent_s_per_byte
        self._number_of: dict[Treatment, int] = {}
        self._effects: list[Effects] = []
        """Effects that were asked for so far, by number."""
        self._steps: dict[tuple[Treatment, ...], StepTime] = {}
        self._learn({FREED})

    def step(self, modes: Sequence[Treatment]) -> StepTime:
        """Goes through one optimizer step with these modes, one per unit, where it has not yet."""
        chosen = tuple(modes)
        found = self._steps.get(chosen)
        if found is None:
            found = self._steps[chosen] = self._step_of(chosen)
        return found

    def _step_of(self, modes: Sequence[Treatment]) -> StepTime:
        is_apart = self.engine.prefetches and any(effects_of(mode).is_passed_over for mode in set(modes))
        micro_batches = self._gone_through(modes) if is_apart else self._composed(modes)
        without_blocks = self._apart(modes) if is_apart else (self._joined_s, self._places)
        durations = _with_activations(self._step, modes, *without_blocks)
        timeline = timeline_of(with_host(durations, self._step, modes), self.cluster, self.engine)
        before: list[Event] = []
        for events in micro_batches:
            if events == before:
                timeline.repeat()
            else:
                timeline.read_all(events)
            before = events
        updated_s = update_s(self._step, modes, host_rent_s_per_byte=self._host_rent_s_per_byte)
        return StepTime(timeline.total_s(self.num_micro_batches) + updated_s, timeline.stalls_s)

    def _composed(self, modes: Sequence[Treatment]) -> list[list[Event]]:
        """Events of each micro-batch, of steps in which all units are treated alike; segments in a row are one."""
        if not self._number_of.keys() >= (different := set(modes)):
            found = dict(zip(different, effects_in(self._step, [*different]), strict=True))
            self._learn(found.values())
            self._number_of |= {mode: self._effects.index(each) for mode, each in found.items()}
        numbers = [*map(self._number_of.__getitem__, modes), 0]  # events that belong to no unit are the same in all
        return [[event for unit, ways in turns for event in ways[numbers[unit]]] for turns in self._turns]

    def _gone_through(self, modes: Sequence[Treatment]) -> list[list[Event]]:
        """Events of each micro-batch, of a step with these modes; segments in a row are one."""
        _, places = self._apart(modes)
        return [
            [
                event
                for event in events
                if event[0] not in _TIMELESS and (event[0] not in _SEGMENTS or places[event[0]][event[1]] == event[1])
            ]
            for events in self.engine.events_of(self._step, modes)
        ]

    def _apart(self, modes: Sequence[Treatment]) -> tuple[Durations, _Places]:
        """Durations for `_gone_through`, and the segment that each segment is part of."""
        if any(effects_of(mode).exchanges for mode in set(modes)):
            return self.durations, dict.fromkeys(_SEGMENTS, range(len(self.profile.segments)))
        return self._joined_apart

    @cached_property
    def _joined_apart(self) -> tuple[Durations, _Places]:
        hosts = self.engine.hosts(
            self.units,
            [FREED] * len(self.units),
            num_segments=len(self.profile.segments),
            rerun=self.profile.rerun,
        )
        places = next(hosts).turns.places
        return self._added(places), places

    def _learn(self, effects: Iterable[Effects]) -> None:
        """Goes through a step in which all units are treated with each of these."""
        self._effects = [*dict.fromkeys([*self._effects, *effects])]
        self._turns, self._places = _joined(tuple(map(self._run, self._effects)), len(self.profile.segments))
        self._joined_s = self._added(self._places)

    def _added(self, places: _Places) -> Durations:
        """Durations where each segment is part of another one."""
        return self.durations._replace(
            forward_s=_added(self.durations.forward_s, places["forward"]),
            backward_s=_added(self.durations.backward_s, places["backward"]),
        )

    def _run(self, effects: Effects) -> _Run:
        return _run(
            self.units,
            len(self.profile.segments),
            tuple(self.profile.rerun.items()),
            self.engine,
            effects,
            num_micro_batches=min(MOST_SIMULATED, self.num_micro_batches),
        )

    @cached_property
    def freed_events(self) -> list[tuple[Event, bool]]:
        """Events of the first micro-batch in which every unit is freed; whether a unit that is kept does without."""
        freed, kept = (self._run(effects).micro_batches[0] for effects in (FREED, KEPT))
        return [(event, event not in kept.get(turn, ())) for turn, events in freed.items() for event in events]


@lru_cache(maxsize=512)
def _run(
    units: tuple[UnitProfile, ...],
    num_segments: int,
    rerun: tuple[tuple[str, Rerun], ...],
    engine: FSDP2,
    effects: Effects,
    *,
    num_micro_batches: int,
) -> _Run:
    """A step in which all units are treated alike."""
    found: list[Mapping[int, tuple[Event, ...]]] = []
    for host in engine.hosts(
        units,
        [effects] * len(units),
        num_micro_batches=num_micro_batches,
        num_segments=num_segments,
        rerun=dict(rerun),
    ):
        by_turn: dict[int, tuple[Event, ...]] = {}
        for turn, event in zip(host.turn_of, host.events, strict=True):
            if event.kind not in _TIMELESS:
                by_turn[turn] = (*by_turn.get(turn, ()), event)
        found.append(by_turn)
    return _Run(tuple(found))


def _merged(runs: Sequence[Mapping[int, tuple[Event, ...]]]) -> _Turns:
    """Turns of the same micro-batch under several effects."""
    turns: _Turns = []
    for turn in sorted(set[int]().union(*runs)):
        ways = tuple([run.get(turn, ()) for run in runs])
        event = next(way[0] for way in ways if way)
        turns.append((-1 if event.kind in _SEGMENTS else event.of, ways))
    return turns


@lru_cache(maxsize=128)
def _joined(runs: tuple[_Run, ...], num_segments: int) -> tuple[list[_Turns], _Places]:
    """Turns of each micro-batch under several effects, in which segments that are run one after the other are one.

    With them comes the segment that each is then part of, which is the same in all micro-batches. Nothing can begin
    between them: of a unit that is a whole block, most turns are such segments.
    """
    found: list[_Turns] = []
    places: Mapping[str, list[int]] = {}
    for same in zip(*(run.micro_batches for run in runs), strict=True):
        places = {kind: [*range(num_segments)] for kind in _SEGMENTS}
        joined: _Turns = []
        last: Event | None = None
        """The segment with which `joined` ends, if it does."""
        for unit, ways in _merged(same):
            event = ways[0][0] if unit < 0 else None
            if event is not None and last is not None and event.kind == last.kind:
                places[event.kind][event.of] = last.of
            else:
                joined.append((unit, ways))
                last = event
        found.append(joined)
    return found, places


def _with_activations(step: Step, modes: Sequence[Treatment], durations: Durations, places: _Places) -> Durations:
    """Seconds of every event where blocks do with what they save as the modes say.

    Args:
        step: its blocks keep what they save.
        modes: one per unit.
        durations: of that step.
        places: segment that each segment is part of, by kind of event.
    """
    if not any("saves" in mode for mode in modes):
        return durations
    forward_s, backward_s = list(durations.forward_s), list(durations.backward_s)
    for unit, mode in zip(step.units, modes, strict=True):
        around = (unit.block, mode["saves"], step.cluster, step.workload.micro_batch_size)
        of_forward_s = copied_s(*around)
        forward_s[places["forward"][unit.last]] += of_forward_s
        backward_s[places["backward"][unit.last]] += block_s(*around) - of_forward_s
    return durations._replace(forward_s=forward_s, backward_s=backward_s)


def _added(seconds: Sequence[float], places: Sequence[int]) -> list[float]:
    """Seconds of segments, each added to those of the segment that it is part of."""
    added_s = [0.0] * len(seconds)
    for place, each_s in zip(places, seconds, strict=True):
        added_s[place] += each_s
    return added_s
