"""Seconds of one optimizer step, without its memory: for a search that asks for many choices of modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from lightning_osdp.core.modes import DP, ShardingMode
from lightning_osdp.core.profile import Rerun
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.cost import block_s, copied_s, optimizer_s
from lightning_osdp.engine import DEFAULT, FSDP2, MOST_SIMULATED, Event
from lightning_osdp.simulation.step import durations_of
from lightning_osdp.simulation.timeline import Durations, Timeline

_TIMELESS = frozenset({"zero", "rerun", "release"})
"""Kinds of events that take no time."""


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
        self.cluster, self.engine = step.cluster, engine
        self.num_micro_batches = step.workload.num_micro_batches
        self.optimizer_s = optimizer_s(step.profile, step.cluster)
        self.durations = durations_of(step, engine)
        self.units, self.micro_batch_size = step.units, step.workload.micro_batch_size
        self.events = _classed(
            step.units,
            len(step.profile.segments),
            tuple(step.profile.rerun.items()),
            engine,
            may_keep=engine.keeps(DP, step.cluster.world_size),
            has_nodes=step.cluster.has_nodes,
        )
        """Events of a micro-batch in which every unit is freed, each with its class: see `_absent`."""

    def step(self, modes: Sequence[ShardingMode]) -> StepTime:
        """One optimizer step with these modes, one per unit."""
        timeline = Timeline(
            self._with_activations(modes),
            overlaps=self.cluster.overlaps,
            gathers_wait_for=self.engine.gathers_wait_for,
        )
        num_simulated = min(MOST_SIMULATED, self.num_micro_batches)
        for index in range(num_simulated):
            absent = [_absent(mode, is_first=index == 0, is_last=index == num_simulated - 1) for mode in modes]
            timeline.read_all(event for event, kind in self.events if kind is None or kind not in absent[event.of])
        return StepTime(timeline.total_s(self.num_micro_batches) + self.optimizer_s, timeline.stalls_s)

    def _with_activations(self, modes: Sequence[ShardingMode]) -> Durations:
        """Seconds of every event where blocks do with what they save as the modes say."""
        durations = self.durations
        if all(mode.activations == "keep" for mode in modes):
            return durations
        forward_s, backward_s = list(durations.forward_s), list(durations.backward_s)
        for unit, mode in zip(self.units, modes, strict=True):
            around = (unit.block, mode.activations, self.cluster, self.micro_batch_size)
            of_forward_s = copied_s(*around)
            forward_s[unit.last] += of_forward_s
            backward_s[unit.last] += block_s(*around) - of_forward_s
        return durations._replace(forward_s=forward_s, backward_s=backward_s)


@cache
def _absent(mode: ShardingMode, *, is_first: bool, is_last: bool) -> frozenset[str]:
    """Classes of events that a unit in this mode does without in such a micro-batch.

    ``freed``: those of a unit that is freed in forward, alone; of these ``again`` gathers it over all ranks, and
    ``in node``, in its place, inside of nodes; ``gather``, ``free``, ``reduce`` and, in its place, ``accumulate``:
    those of all units; ``between``: a free and a gather of all units between two calls in backward.
    """
    classes = {"freed", "again", "in node"} if mode.resident else set()
    classes.add("again" if mode.regathers_over == "node" else "in node")
    waits = mode.sync == "last" and not is_last
    classes.add("reduce" if waits else "accumulate")
    if waits and mode.resident:
        classes |= {"free", "between"}
    if mode.sync == "last" and mode.resident and not is_first:
        classes.add("gather")
    return frozenset(classes)


@lru_cache(maxsize=128)
def _classed(
    units: tuple[UnitProfile, ...],
    num_segments: int,
    rerun: tuple[tuple[str, Rerun], ...],
    engine: FSDP2,
    *,
    may_keep: bool,
    has_nodes: bool,
) -> tuple[tuple[Event, str | None], ...]:
    """Events of freed units; those of kept ones are some of these, in the same order.

    Each ``reduce`` is followed by the ``accumulate`` that may take its place, and each ``gather`` of freed units alone
    by the ``regather`` that may.
    """
    (freed,), (kept,) = (
        engine.micro_batches(
            units,
            [is_kept] * len(units),
            [False] * len(units),
            num_segments=num_segments,
            rerun=dict(rerun),
        )
        for is_kept in (False, may_keep)
    )
    left = (event for event in kept if event.kind not in _TIMELESS)
    expected = next(left, None)
    classed: list[tuple[Event, str | None]] = []
    is_in_backward, flattened = False, set[int]()
    for event in freed:
        if event.kind in _TIMELESS:
            continue
        if event == expected:
            is_between = is_in_backward and event.of not in flattened and event.kind in {"gather", "free"}
            own = event.kind if event.kind in {"gather", "free", "reduce"} else None
            classed.append((event, "between" if is_between else own))
            expected = next(left, None)
            is_in_backward = is_in_backward or event == Event("forward", num_segments - 1)
            if event.kind == "flatten":
                flattened.add(event.of)
            if event.kind == "reduce":
                classed.append((Event("accumulate", event.of), "accumulate"))
        elif event.kind == "gather":
            classed.append((event, "again"))
            if has_nodes:
                classed.append((Event("regather", event.of), "in node"))
        else:
            classed.append((event, "freed"))
    return tuple(classed)
