"""The timeline where computing and collectives slow each other down: they share multiprocessors and memory.

While a collective runs, computing goes on at 1 / `Contention.computing` of its rate, and the collective at
1 / `Contention.of_collective` of its own while the device computes. So what an event takes is known only when all that
runs beside it is: collectives are kept as work that is left, and are taken as far as computing has come.

References:
    Galvatron (Miao et al. 2022): what overlaps is slowed on both sides by a constant factor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from typing_extensions import override

from lightning_osdp.core.cluster import Contention
from lightning_osdp.planner.engine import COLLECTIVES, HOLDING_UP, REDUCTIONS, Event
from lightning_osdp.planner.simulation.timeline import COMMUNICATION, Durations, Timeline

_BEHIND = {"all_reduce": "node", "all_gather": "host"}
"""Operation -> the link whose collectives issued before it are done before it begins."""


@dataclass(eq=False, slots=True)
class _Collective:
    """Collective that was issued."""

    event: Event
    micro_batch: int
    left_s: float
    """Seconds that are left of it if nothing runs beside it."""
    slowdown: float
    """Seconds beside computing over those alone."""
    after: _Collective | None
    """Collective of another communicator, which this one waits for."""
    start_s: float | None = None
    end_s: float | None = None
    """Time at which it was done; None while it is not."""


class ContendedTimeline(Timeline):
    """Timeline where communication overlaps computing, and each slows the other down."""

    def __init__(
        self,
        durations: Durations,
        contention: Contention,
        *,
        asynchronous_unshard: bool,
        copies_beside: bool = False,
        is_alone: bool = False,
        waits_for: Collection[str] = (),
        keeps_intervals: bool = False,
    ) -> None:
        super().__init__(
            durations,
            overlaps=True,
            asynchronous_unshard=asynchronous_unshard,
            copies_beside=copies_beside,
            is_alone=is_alone,
            waits_for={*waits_for, *HOLDING_UP},
            keeps_intervals=keeps_intervals,
        )
        self._contention = contention
        self._queues: dict[str, deque[_Collective]] = {link: deque() for link in self.communicators_s}
        """Collectives of each communicator that are not done when computing has come to `compute_s`."""
        self._running: list[_Collective] = []
        """Collectives that run, one for each communicator."""
        self._gathers: dict[int, _Collective] = {}
        """Unit -> its latest gather."""
        self._reduce_scatter: _Collective | None = None
        """Latest reduce-scatter; None before the first."""
        self._busy_since_s = 0.0
        """Time from which to `compute_s` the device computed without a break."""

    @property
    def now_s(self) -> float:
        """Time at which everything issued so far is done, in seconds, if nothing more is computed beside it."""
        left_s = (sum(each.left_s for each in queue) for queue in self._queues.values())
        return self.compute_s + max(left_s)

    def _communicate(self, event: Event, micro_batch: int, may_start_s: float) -> float:
        """Issues a collective; returns the time of its end, infinite where the queues have yet to show it."""
        kind, of = event
        operation, _, link = COLLECTIVES[kind]
        queue = self._queues[link]
        # an all-reduce between nodes is of what the reduce-scatter issued before it has summed inside of them; what an
        # all-gather sends is behind what comes from the host
        before = None if kind in REDUCTIONS else self._queues.get(_BEHIND.get(operation, ""))
        after = before[-1] if before else None
        alone_s = self.durations.collectives_s[kind][of]
        issued = _Collective(event, micro_batch, alone_s, self._contention.of_collective(alone_s), after)
        if operation == "all_gather":
            self._gathers[of] = issued
        if kind in REDUCTIONS:
            self._reduce_scatter = issued
        if not queue and after is None:
            issued.start_s = max(self.communicators_s[link], may_start_s)
            self._catch_up(issued)
        if issued.end_s is not None:
            return issued.end_s
        queue.append(issued)
        if queue[0] is issued:
            self._begin()
        if kind not in self.waits_for:
            return math.inf
        self._wait_for(issued)
        return self.compute_s

    @override
    def _copy_in(self, event: Event, micro_batch: int) -> None:
        super()._copy_in(event, micro_batch)
        if self._copied_in_s == math.inf:  # then the gather is behind it
            self._copied_in_s = 0.0

    def _catch_up(self, issued: _Collective) -> None:
        """Takes a collective that could begin before computing came to where it is as far as that.

        Computing that was taken to be alone then has not been: it is done later.
        """
        assert issued.start_s is not None
        begins_s = max(issued.start_s, min(self._busy_since_s, self.compute_s))
        alone_s, beside_s = begins_s - issued.start_s, self.compute_s - begins_s
        if issued.left_s <= alone_s:
            self._end(issued, issued.start_s + issued.left_s)
            return
        issued.left_s -= alone_s
        # a collective of another communicator has slowed computing already
        slowdown = 1.0 if self._running else self._contention.computing
        needs_s = issued.left_s * issued.slowdown
        passed_s = min(needs_s, beside_s * slowdown)
        later_s = passed_s * (1 - 1 / slowdown)
        self.compute_s += later_s
        self.slowed_s += later_s
        issued.left_s -= passed_s / issued.slowdown
        if passed_s == needs_s:
            self._end(issued, begins_s + needs_s)

    def _run(self, seconds: float) -> None:
        slowdown = self._contention.computing
        while seconds > 0:
            if not self._running:
                self.compute_s += seconds
                return
            needs_s, first_s = seconds * slowdown, min([each.left_s * each.slowdown for each in self._running])
            passed_s = min(needs_s, first_s)
            worked_s = passed_s / slowdown
            seconds = seconds - worked_s if first_s < needs_s else 0.0
            self._pass(passed_s, is_computing=True)
            self.slowed_s += passed_s - worked_s

    def _wait_for_gather(self, of: int) -> None:
        gather = self._gathers.get(of)
        if gather is not None:
            self._wait_for(gather)

    def _wait_for_reduce_scatter(self) -> None:
        if self._reduce_scatter is not None:
            self._wait_for(self._reduce_scatter)

    def _wait_for_all(self) -> None:
        for queue in self._queues.values():
            while queue:
                self._wait_for(queue[-1])
        super()._wait_for_all()

    def _wait_for(self, collective: _Collective) -> None:
        while collective.end_s is None:
            self._pass(min([each.left_s for each in self._running]), is_computing=False)
            self._busy_since_s = self.compute_s

    def _begin(self) -> None:
        """Looks anew at what communicators work on."""
        self._running = []
        for queue in self._queues.values():
            head = queue[0] if queue else None
            if head is not None and (head.after is None or head.after.end_s is not None):
                if head.start_s is None:
                    head.start_s = self.compute_s
                self._running.append(head)

    def _pass(self, seconds: float, *, is_computing: bool) -> None:
        """Lets so many seconds go by, no more than the first of the collectives that run is done in."""
        self.compute_s += seconds
        is_any_done = False
        for each in self._running:
            slowdown = each.slowdown if is_computing else 1.0
            is_done = seconds == each.left_s * slowdown
            each.left_s -= seconds / slowdown
            if is_done or each.left_s <= 0:
                self._queues[COLLECTIVES[each.event.kind].link].popleft()
                self._end(each, self.compute_s)
                is_any_done = True
        if is_any_done:
            self._begin()

    def _end(self, collective: _Collective, end_s: float) -> None:
        collective.end_s, collective.left_s = end_s, 0.0
        self.communicators_s[COLLECTIVES[collective.event.kind].link] = end_s
        self._note_reduced(collective.event, end_s)
        if self.keeps_intervals:
            assert collective.start_s is not None
            self._keep(COMMUNICATION, collective.event, collective.micro_batch, collective.start_s, end_s)
