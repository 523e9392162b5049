"""Seconds that no modes go below where communication overlaps computing.

Whatever the modes, one thing is computed at a time and one collective runs at a time. A reduce-scatter comes after all
that was computed before it, and collectives that were issued after it run after it. So for every reduce-scatter c

    T(x)  >=  K ( computing before c  +  c and all collectives issued after it ) + optimizer

where computing includes the gathers that it has to begin with, and the runtime's overhead. One more of these *paths*
has no computing, it is the sum of all collectives; the last one is all computing. Before c a path may make *detours*:
backward of a unit that was freed waits for its gather, which waits for the reduce-scatter v issued before, so that v
and the gather take the place of what is computed meanwhile. Where gathers wait for all computing that was issued before
them, the end of a frozen unit's backward is such a c or v, too, with nothing to reduce.

Modes enter a path as a sum over units: which of their collectives are on it, the overhead, and what their blocks take
to do without what they would save. The last two count in full, although a detour, or a wait for a gather of forward,
passes some of them by: it is worth so much less as that may be at most. So the least seconds of a path under the limit
are those of the nested knapsack that is solved where nothing overlaps, and its bound on them is a bound on the step.
Where units may leave their reduce-scatters to the last micro-batch, the order above holds there alone: a path then has
gathers after c in that one only, no detours, and waits for no gathers before c. Where units may be sharded in nodes, or
move activations, there are no detours and no such waits either: which collectives there are, and how long they take,
depends on modes then. Collectives inside of
nodes are on no path, for they have a communicator of their own; of a unit that is sharded there c is the all-reduce
between nodes. A unit that may be resident is waited for by no path before c, for it may gather nothing, and what is
gathered ahead may take its place: a gather of backward is taken to be issued where backward comes to the last unit
before that is never resident. So it is where a unit may move activations. Its exchanges are on every path: computing
goes on behind them, and collectives that are issued later run later. Computing does not depend on modes otherwise, so
there is little to be had from weighing several paths (a Lagrangian): the largest of their bounds is taken. But where
units may move activations, one path leaves out what they would gather and another what they would exchange: weighted
means of the path of all collectives and that of all computing are bounds, too. The latter has, besides, what computing
cannot hide of each gather of forward and of each reduce-scatter. A gather runs beside the computing of units alone that
are gathered themselves, for an exchange that is issued after it runs after it, and computing waits for that. A
reduce-scatter is over when the next unit is reduced.

Where collectives slow computing down by a, and computing slows them down by b (`Contention`), a collective of s seconds
runs for some u seconds beside computing and for s - u / b alone. Computing takes u (1 - 1 / a) longer for the first,
and does nothing for the second, so that

    T(x)  >=  K computing  +  min(1, b (1 - 1 / a)) (all collectives)  +  optimizer

On nodes these are reduce-scatters over all ranks alone: a gather that begins before it is issued is not known to slow
computing that a collective inside of the nodes has slowed already.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate, dropwhile, takewhile
from typing import NamedTuple

from lightning_osdp.core.axes import ZDP, Treatment
from lightning_osdp.planner.assign.additive import Additive
from lightning_osdp.planner.assign.setting import Setting
from lightning_osdp.planner.cost import block_s, copied_s
from lightning_osdp.planner.engine import COLLECTIVES, HOLDING_UP, effects_of

_WEIGHTS = tuple(share / 16 for share in range(16))
"""Weights of the path of all collectives that are tried in means with that of all computing."""

_FILLER = 1e-9
"""Weight of a detour to a unit that is kept: it costs nothing now, and something in modes that free the unit."""


class _Detour(NamedTuple):
    """Detour from a reduce-scatter by way of a gather to what needs the gather."""

    unit: int
    leaves: int
    """Number of the reduce-scatter, from 1."""
    returns: int
    """Number of the first reduce-scatter after the detour is over."""
    more_s: float
    """Seconds beyond what is computed meanwhile."""


class Path(NamedTuple):
    """One path through a micro-batch."""

    turn: int
    """Number of the reduce-scatter c; 0: collectives from the beginning."""
    detours: tuple[_Detour, ...]


class Paths:
    """Paths of one setting, whose cluster overlaps."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._clock, self._options = setting, setting.costs.clock, setting.costs.menus
        collectives_s = self._clock.durations.collectives_s
        self._gather_s = collectives_s["gather"]
        self._reduces_s = {
            kind: collectives_s[kind]
            for kind, each in COLLECTIVES.items()
            if kind in collectives_s
            and each.link == "all"
            and each.operation != "all_gather"
            and kind not in HOLDING_UP
        }
        self._num_micro_batches = setting.workload.num_micro_batches
        self._optimizer_s = setting.costs.optimizer_s - setting.costs.root_more_s  # it may be on the device
        offered = self._offered = {effects_of(mode) for options in self._options for mode in options}
        self._may_accumulate = any(each.waits for each in offered)
        self._may_wait = not self._may_accumulate and not any(
            each.sharded_over != "all" or each.exchanges for each in offered
        )
        # Micro-batches of a step in which a gather comes after every reduce-scatter that was issued before it. Where
        # units may leave theirs to the last micro-batch, a gather of another one need not have waited for anything.
        self._num_ordered = 1 if self._may_accumulate else self._num_micro_batches
        self._flattened: dict[int, int] = {}  # unit -> number of its reduce-scatter
        self._gathered: list[int] = []  # units that are gathered whatever their mode
        self._regathers: list[tuple[int, int]] = []  # units if freed, with the number of reduce-scatters before
        self._detours: dict[int, list[_Detour]] = {}  # by where they return
        # units that may gather nothing
        self._may_stay = {
            unit
            for unit, options in enumerate(self._options)
            if any(effects_of(mode).is_passed_over for mode in options)
        }
        # gathers wait for all computing that was issued before them
        self._copies_beside = setting.engine.copies_beside(setting.cluster)
        self._gathers_wait = setting.engine.asynchronous_unshard or not setting.cluster.has_streams
        self._walk()

    def _walk(self) -> None:
        """Collects all that may be on a path from the events of a micro-batch."""
        durations = self._clock.durations
        computed_s = gathered_s = 0.0
        ready_s: dict[int, float] = {}
        regathered: dict[int, int] = {}
        before_s, busy_s, reduces_s = [0.0], [0.0], [0.0]
        most_forward_s, most_backward_s = self._most_of_segments_s()
        passed_s = 0.0  # the most of all modes, of what is on a path whatever it passes by
        num_before, is_in_backward = 0, False  # reduce-scatters before what may be gathered ahead past resident units
        passes_over = self._may_stay and self._setting.engine.backward_prefetch == "pre"
        for (kind, of), is_again in self._clock.freed_events:
            if kind == "await" and is_in_backward and of not in self._may_stay:
                num_before = len(reduces_s) - 1
            if kind == "gather" and is_again:
                regathered[of] = num_before if passes_over else len(reduces_s) - 1
                self._regathers.append((of, regathered[of]))
            elif kind == "gather":
                self._gathered.append(of)
                gathered_s += 0.0 if of in self._may_stay else self._gather_s[of]
                ready_s[of] = gathered_s
            elif kind == "await" and self._may_wait:
                computed_s = max(computed_s, ready_s[of] - passed_s)
                leaves = regathered.pop(of, 0)
                more_s = reduces_s[leaves] + self._gather_s[of] - (computed_s + passed_s - busy_s[leaves])
                if leaves and more_s > 0:
                    found = _Detour(of, leaves, len(reduces_s), more_s)
                    self._detours.setdefault(found.returns, []).append(found)
            elif kind == "forward":
                computed_s += durations.forward_s[of]
                passed_s += most_forward_s.get(of, 0.0)
            elif kind == "backward":
                is_in_backward = True
                computed_s += durations.backward_s[of]
                passed_s += most_backward_s.get(of, 0.0)
            elif kind == "flatten":
                self._flattened[of] = len(reduces_s)
                passed_s += self._most_overhead_s(of)
            is_frozen = kind == "flatten" and not self._setting.units[of].gradient_bytes
            if kind == "reduce" or (is_frozen and self._gathers_wait):
                before_s.append(computed_s)
                busy_s.append(computed_s + passed_s)
                reduces_s.append(self._reduces_s["reduce"][of])
        before_s.append(computed_s)  # frozen units may come after the last reduce-scatter
        self._constants_s = before_s
        """Seconds of a micro-batch before each reduce-scatter, whatever the modes; 0: none, the last: of all of it."""

    def _most_of_segments_s(self) -> tuple[dict[int, float], dict[int, float]]:
        """Segment -> the most that blocks take in its forward, and in its backward, to do without what they save."""
        forward_s, backward_s = dict[int, float](), dict[int, float]()
        around = (self._setting.cluster, self._setting.workload.micro_batch_size)
        for unit, options in zip(self._setting.units, self._options, strict=True):
            if unit.block is not None:
                copies_s = {mode: copied_s(unit.block, mode["saves"], *around) for mode in options}
                forward_s[unit.last] = max(copies_s.values())
                backward_s[unit.last] = max(
                    block_s(unit.block, mode["saves"], *around) - copies_s[mode] for mode in options
                )
        return forward_s, backward_s

    def longest(self, modes: Sequence[Treatment]) -> Path:
        """The path that takes longest with these modes, one per unit."""
        detours_s: list[float] = [0.0]
        taken: list[_Detour | None] = [None]
        for turn in range(1, len(self._constants_s)):
            best_s, best = detours_s[-1], None
            for detour in self._detours.get(turn, ()):
                weight = 1.0 if self._is_again(modes[detour.unit]) else _FILLER
                total_s = detours_s[detour.leaves] + detour.more_s * weight
                if total_s > best_s:
                    best_s, best = total_s, detour
            detours_s.append(best_s)
            taken.append(best)
        direct_s = self._direct_s([(mode,) for mode in modes])
        turn = max(range(len(direct_s)), key=lambda turn: direct_s[turn] + self._num_micro_batches * detours_s[turn])
        return Path(turn, _chosen(taken, turn))

    def least_s(self) -> float:
        """Seconds of a step that no modes go below, as if memory were no concern."""
        direct_s = max(self._direct_s(self._options)) + self._optimizer_s
        return max([direct_s, *(each.fastest_s for each in self.means)])

    @cached_property
    def _outermost(self) -> tuple[Additive, Additive]:
        """Seconds of the path of all collectives, and of that of all computing."""
        return self.at(Path(0, ())), self.at(Path(len(self._constants_s) - 1, ()))

    @cached_property
    def _mean(self) -> Additive | None:
        """Weighted seconds of two paths, with the weights of the largest bound; None where nothing is exchanged."""
        if not any(each.exchanges for each in self._offered):
            return None
        collectives, computing = self._outermost
        computing_s = [
            {mode: seconds + self._exposed_s(unit, mode) for mode, seconds in of_unit.items()}
            for unit, of_unit in enumerate(computing.times_s)
        ]

        def weighed(weight: float) -> Additive:
            times_s = [
                {mode: weight * seconds + (1 - weight) * computed_s[mode] for mode, seconds in sent_s.items()}
                for sent_s, computed_s in zip(collectives.times_s, computing_s, strict=True)
            ]
            constant_s = weight * collectives.constant_s + (1 - weight) * computing.constant_s
            return dataclasses.replace(computing, times_s=times_s, constant_s=constant_s)

        return max(map(weighed, _WEIGHTS), key=lambda each: each.fastest_s)

    def _exposed_s(self, unit: int, mode: Treatment) -> float:
        """Seconds of a unit's gathers in forward and of its reduce-scatters that computing cannot hide.

        Gathers count in full, less what the unit's own computing hides of other gathers. None is known where lists pass
        over resident units, where units are called again, and where some wait from one micro-batch to the next.
        """
        if not self._is_exposure_known or effects_of(mode).exchanges:
            return 0.0
        counts = effects_of(mode).counts(self._setting.units[unit], num_micro_batches=self._num_micro_batches)
        gathers_s = self._num_gathers(mode) * self._gather_s[unit] - self._num_micro_batches * self._hidden_s[unit]
        return gathers_s + counts["reduce"] * max(0.0, self._reduces_s["reduce"][unit] - self._beside_s[unit])

    @cached_property
    def _is_exposure_known(self) -> bool:
        is_called_again = any(len(unit.calls) > 1 for unit in self._setting.units)
        return not is_called_again and not any(each.is_resident or each.waits for each in self._offered)

    @cached_property
    def _hidden_s(self) -> Sequence[float]:
        """Seconds, of each unit's computing in forward, beside which gathers of others run at most.

        Where gathers wait for computing that was issued before them, one runs from when a unit is awaited to when the
        next one is; else two may.
        """
        units, segments = self._setting.units, self._setting.profile.segments
        owners = {operator.name: index for index, unit in enumerate(units) for operator in unit.operators}
        more_s, _ = self._most_of_segments_s()
        forward = takewhile(lambda each: each[0].kind != "backward", self._clock.freed_events)
        hidden_s, later_s, left_s = [0.0] * len(units), 0.0, dict[int, float]()
        for (kind, of), _ in reversed([*forward]):
            if kind == "await":
                later_s, left_s = max(later_s, self._gather_s[of]), {}
            elif kind == "forward":
                owner = owners.get(segments[of].operator, 0)
                left_s.setdefault(owner, later_s if self._gathers_wait else 2 * later_s)
                seconds = min(self._clock.durations.forward_s[of] + more_s.get(of, 0.0), left_s[owner])
                left_s[owner] -= seconds
                hidden_s[owner] += seconds
        return hidden_s

    @cached_property
    def _beside_s(self) -> Sequence[float]:
        """Seconds of computing at most from each unit's reduce-scatter to the next, which waits for the first."""
        _, more_s = self._most_of_segments_s()
        beside_s, reduced = [0.0] * len(self._setting.units), 0
        for (kind, of), _ in dropwhile(lambda each: each[0].kind != "reduce", self._clock.freed_events):
            if kind == "reduce":
                reduced = of
            elif kind == "backward":
                beside_s[reduced] += self._clock.durations.backward_s[of] + more_s.get(of, 0.0)
            elif kind == "flatten":
                beside_s[reduced] += self._most_overhead_s(of)
        return beside_s

    @cached_property
    def _contended(self) -> Additive | None:
        """Seconds of all computing, and what collectives add to them; None where they do not slow computing down."""
        cluster = self._setting.cluster
        slowed = min(1.0, cluster.contention.collectives * (1 - 1 / cluster.contention.computing))
        if slowed == 0:
            return None
        collectives, computing = self._outermost

        def sent_s(unit: int, mode: Treatment) -> float:
            if cluster.has_nodes:
                return self._all_reduces_s(unit, mode)
            return collectives.times_s[unit][mode] - self._update_s(unit, mode) - self._exchanges_s(unit, mode)

        times_s = [
            {mode: seconds + slowed * sent_s(unit, mode) for mode, seconds in of_unit.items()}
            for unit, of_unit in enumerate(computing.times_s)
        ]
        return dataclasses.replace(computing, times_s=times_s)

    @cached_property
    def _copied(self) -> Additive | None:
        """Seconds of copies of shards from the host, one after the other on its link; None where none run beside."""
        if not self._copies_beside or not any(each.shard_on_host for each in self._offered):
            return None
        times_s = [
            {mode: self._setting.costs.unit_s(self._setting.units[unit], mode, "copies") for mode in options}
            for unit, options in enumerate(self._options)
        ]
        return dataclasses.replace(self._outermost[1], times_s=times_s, constant_s=self._optimizer_s)

    @property
    def means(self) -> Sequence[Additive]:
        """Seconds of weighted paths, and of copies, which no modes go below."""
        return tuple(each for each in (self._mean, self._contended, self._copied) if each is not None)

    def _direct_s(self, options: Sequence[Sequence[Treatment]]) -> list[float]:
        """Seconds of a step's path without detours, for each turn: of each unit the least of its options."""
        more_s = [0.0] * (len(self._constants_s) + 1)
        more_s[0] += sum(min(self._exchanges_s(unit, mode) for mode in each) for unit, each in enumerate(options))
        for unit, turn in self._flattened.items():
            update_s = min(self._update_s(unit, mode) for mode in options[unit])
            more_s[0] += update_s
            more_s[turn] += min(self._own_s(unit, mode, copies=True) for mode in options[unit]) - update_s
            reduces_s = min(self._all_reduces_s(unit, mode) for mode in options[unit])
            more_s[0] += reduces_s
            more_s[turn + 1] -= reduces_s
        for unit in self._gathered:
            gathers_s = self._gather_s[unit] * min(self._num_gathers(mode) for mode in options[unit])
            more_s[0] += gathers_s
            more_s[1] -= gathers_s
        for unit, before in self._regathers:
            if all(map(self._is_again, options[unit])):
                more_s[0] += self._num_micro_batches * self._gather_s[unit]
                more_s[1] -= (self._num_micro_batches - self._num_ordered) * self._gather_s[unit]
                more_s[before + 1] -= self._num_ordered * self._gather_s[unit]
        return [
            self._num_micro_batches * constant_s + own_s
            for constant_s, own_s in zip(self._constants_s, accumulate(more_s), strict=False)
        ]

    def _most_overhead_s(self, unit: int) -> float:
        """Seconds of a micro-batch that the runtime takes for a unit at most."""
        costs, profile = self._setting.costs, self._setting.units[unit]
        modes = {ZDP, *self._options[unit]}
        most_s = max(costs.unit_s(profile, mode, "overhead") - self._update_s(unit, mode) for mode in modes)
        return most_s / self._num_micro_batches

    def _update_s(self, unit: int, mode: Treatment) -> float:
        """Seconds of the unit's update, which is after all else, beyond those of ZDP."""
        return self._setting.costs.unit_s(self._setting.units[unit], mode)

    def _own_s(self, unit: int, mode: Treatment, *, copies: bool) -> float:
        """Seconds, before the unit's gradients are reduced and in its update, that depend on its mode alone.

        With ``copies``: also of those of its shard from the host where they are in the stream that computes. A detour
        may pass by some that come before it is over.
        """
        terms = ("overhead", "activations", *(("copies",) if copies and not self._copies_beside else ()))
        return self._setting.costs.unit_s(self._setting.units[unit], mode, *terms)

    def _exchanges_s(self, unit: int, mode: Treatment, *, computes: bool = False) -> float:
        """Seconds of a step for which moving a unit's activations keeps the links between all ranks busy.

        With ``computes``: seconds for which it holds up computing, which exchanges inside of nodes do as well.
        """
        if not effects_of(mode).exchanges:
            return 0.0
        seconds = self._clock.durations.collectives_s
        counts = effects_of(mode).counts(num_micro_batches=self._num_micro_batches)
        return sum(
            number * seconds[kind][unit]
            for kind, number in counts.items()
            if computes or COLLECTIVES[kind].link == "all"
        )

    def _is_again(self, mode: Treatment) -> bool:
        """True where a unit is gathered again over all ranks, where paths are."""
        return effects_of(mode).left_over == "all" and not effects_of(mode).exchanges

    def _num_gathers(self, mode: Treatment) -> int:
        """Number of gathers in a step over all ranks of a unit that is not there, whether or not forward frees it."""
        effects = effects_of(mode)
        if effects.sharded_over != "all" or effects.is_passed_over:
            return 0
        return 1 if effects.stays else self._num_micro_batches

    def _all_reduces_s(self, unit: int, mode: Treatment) -> float:
        """Seconds that a step reduces a unit's gradients beyond nodes."""
        counts = effects_of(mode).counts(num_micro_batches=self._num_micro_batches)
        return sum(counts[kind] * seconds[unit] for kind, seconds in self._reduces_s.items() if counts[kind])

    def at(self, path: Path) -> Additive:
        """The seconds of one path."""
        freed_s = dict.fromkeys(range(len(self._setting.units)), 0.0)
        computes = path.turn == len(self._constants_s) - 1  # to the end, and no collective after it
        for unit, before in self._regathers:
            if before >= path.turn:
                freed_s[unit] += (self._num_ordered if path.turn else self._num_micro_batches) * self._gather_s[unit]
        for detour in path.detours:
            freed_s[detour.unit] += self._num_micro_batches * detour.more_s
        gathered = Counter(self._gathered if path.turn == 0 else ())
        own_s = partial(self._own_s, copies=not path.detours)
        times_s = []
        for unit, options in enumerate(self._options):
            turn = self._flattened[unit]
            times_s.append(
                {
                    mode: self._exchanges_s(unit, mode, computes=computes)
                    + (own_s if turn <= path.turn else self._update_s)(unit, mode)
                    + (self._all_reduces_s(unit, mode) if turn >= path.turn else 0.0)
                    + gathered[unit] * self._num_gathers(mode) * self._gather_s[unit]
                    + (freed_s[unit] if self._is_again(mode) else 0.0)
                    for mode in options
                }
            )
        constant_s = self._num_micro_batches * self._constants_s[path.turn] + self._optimizer_s
        return dataclasses.replace(self._setting.costs.additive, times_s=times_s, constant_s=constant_s)


def _chosen(taken: Sequence[_Detour | None], turn: int) -> tuple[_Detour, ...]:
    """Detours before this turn."""
    chosen = []
    while turn > 0:
        detour = taken[turn]
        if detour is not None:
            chosen.append(detour)
        turn = turn - 1 if detour is None else detour.leaves
    return tuple(chosen)
