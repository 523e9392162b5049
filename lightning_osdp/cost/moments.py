"""The largest moments of one optimizer step, whatever the modes: a running sum over the engine's events.

The engine says what lives at each moment.

Reduced gradients of the step before live in the first forward, because Lightning zeroes them between forward and
backward. With several micro-batches they live from the first one's backward on, and each further reduce-scatter adds to
them. A unit that reduces its gradients in the last one only has them whole instead, and backward adds to these; the
reduce-scatter of the last one frees them. When a unit's gradients are complete, what its backward had saved is gone,
and the gradient that it hands on is there: ``settled`` bytes in place of the saved ones.

Modes enter in one way only. Take the units in the order in which forward leaves them. Units that forward has left and
backward has not come back to are the first k of them, for some k; exactly the DP ones among them are gathered. So a
step in which every unit is ZDP, with k noted at each moment, tells the peak of every choice of modes.

A unit that forward calls again is taken there as gathered from its first call to its last: exact for what is kept and
in backward; too much, between two calls of forward, for what is freed. `simulate` has it exactly.

References:
    lightning/pytorch/loops/optimization/automatic.py (order of forward, zero_grad, backward).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.profile import Rerun
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine import FSDP2, MOST_SIMULATED, Effects, Event, Moment, effects_of, leaving_order


def largest_moments(step: Step, modes: Sequence[Treatment], engine: FSDP2) -> tuple[dict[int, Moment], Moment]:
    """Largest moments of a step in these modes: ZDP, but of units that move activations in all that are asked for.

    Returns:
        By k, the largest moment at which the first k units of `leaving_order` are freed; there is none for a k at which
        nothing happens. And the optimizer step.
    """
    largest: dict[int, Moment] = {}
    num_freed = 0  # at the moment that is being read

    def keep_if_largest(num_bytes: float, moment: Callable[[], Moment]) -> None:
        if num_freed not in largest or num_bytes > largest[num_freed].num_bytes:
            largest[num_freed] = moment()

    live = engine.live_parts(step, keep_if_largest, modes=modes, is_bound=True)
    simulated = _events(
        step.units,
        tuple(effects_of(mode) for mode in modes),
        num_micro_batches=min(MOST_SIMULATED, step.workload.num_micro_batches),
        num_segments=len(step.profile.segments),
        rerun=tuple(step.profile.rerun.items()),
        engine=engine,
    )
    for events in simulated:
        live.begin_micro_batch()
        freed = _Freed(step.units)
        for event in events:
            freed.read(event)
            num_freed = freed.num
            live.read(event)
    num_freed = -1
    live.update()
    return largest, largest.pop(-1)


@lru_cache(maxsize=128)
def _events(
    units: tuple[UnitProfile, ...],
    effects: tuple[Effects, ...],
    *,
    num_micro_batches: int,
    num_segments: int,
    rerun: tuple[tuple[str, Rerun], ...],
    engine: FSDP2,
) -> list[list[Event]]:
    """Events of micro-batches with these effects; they do not depend on how many samples these have."""
    return engine.micro_batches(
        units,
        effects,
        num_micro_batches=num_micro_batches,
        num_segments=num_segments,
        rerun=dict(rerun),
        merges_calls=True,
    )


class _Freed:
    """Number of units, in `leaving_order`, before the last one that is freed between its forward and its backward.

    These are all freed but where a block is run again: it has one of its units gathered before those that follow.
    """

    def __init__(self, units: Sequence[UnitProfile]) -> None:
        self.num = 0
        self._places = {unit: place for place, unit in enumerate(leaving_order(units))}
        self._is_freed = [False] * len(self._places)
        self._through: set[int] = set()

    def read(self, event: Event) -> None:
        """Reads one more event of a micro-batch."""
        place = self._places.get(event.of)
        if place is None:
            return
        if event.kind == "flatten":
            self._through.add(place)
        elif event.kind == "free" and place not in self._through:
            self._is_freed[place] = True
            self.num = max(self.num, place + 1)
        elif event.kind == "gather":
            self._is_freed[place] = False
            while self.num and not self._is_freed[self.num - 1]:
                self.num -= 1
