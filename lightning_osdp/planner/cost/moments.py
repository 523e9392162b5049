"""The largest moments of optimizer steps, whatever the modes: a running sum over the engine's events.

The engine says what lives at each moment.

Reduced gradients of the step before live in the first forward, because Lightning zeroes them between forward and
backward. With several micro-batches they live from the first one's backward on, and each further reduce-scatter adds to
them. A unit that reduces its gradients in the last one only has them whole instead, and backward adds to these; the
reduce-scatter of the last one frees them. When a unit's gradients are complete, what its backward had saved is gone,
and the gradient that it hands on is there: ``settled`` bytes in place of the saved ones.

Modes enter in one way only. Take the units in the order in which forward leaves them. Units that forward has left and
backward has not come back to are the first k of them, for some k; exactly the DP ones among them are gathered. So a
step in which every unit is ZDP, with k noted at each moment, tells the peak of every choice of modes.

Events do not depend on the samples of a micro-batch, and the bytes alive at each of them are affine in the samples. So
a moment is a line, and the largest moments of steps of all sizes are on the upper envelope of such lines.

A unit that forward calls again is taken there as gathered from its first call to its last: exact for what is kept and
in backward; too much, between two calls of forward, for what is freed. `simulate` has it exactly.

References:
    lightning/pytorch/loops/optimization/automatic.py (order of forward, zero_grad, backward).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.batch_policy import MOST_SAMPLES
from lightning_osdp.core.profile import Rerun
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.engine import FSDP2, MOST_SIMULATED, Effects, Event, Moment, effects_of, leaving_order

UPDATE = -1
"""The optimizer step, among moments by k."""

_MOST_READ = 2
"""Numbers of samples that are each read for themselves: most steps are asked for no others."""

Teller: TypeAlias = Callable[[int, float, Callable[[], Moment]], None]
"""Takes the k of each moment, its bytes, and what makes a `Moment` of it where that is wanted."""


class _Line(NamedTuple):
    """Bytes of one moment, with any number of samples."""

    per_sample: float
    num_bytes: float
    """Bytes with some number of samples."""


class LargestMoments:
    """Largest moments of steps that differ in nothing but the samples of a micro-batch.

    The first two are read for their own samples. For a third, the events are read at two numbers of samples far apart,
    and what may be the largest moment of any samples is known from then on.

    Args:
        read: goes through such a step with so many samples, and tells of each moment.
        is_affine: whether bytes are affine in the samples; else each number of samples is read for itself.
    """

    def __init__(self, read: Callable[[int, Teller], None], *, is_affine: bool) -> None:
        self._read, self._is_affine = read, is_affine
        self._known: dict[int, Mapping[int, float]] = {}
        self._read_last: tuple[int, Mapping[int, Moment]] | None = None
        self._near = 0
        self._envelopes: dict[int, list[_Line]] = {}

    def num_bytes(self, samples: int) -> Mapping[int, float]:
        """Bytes of the largest moments with so many samples, by k; there is none for a k at which nothing happens."""
        if samples in self._known:
            return self._known[samples]
        if len(self._known) < _MOST_READ or not self._is_affine:
            found = {k: moment.num_bytes for k, moment in self.moments(samples).items()}
            self._known = {**self._known, samples: found} if self._is_affine else {samples: found}
            return found
        if not self._envelopes:
            self._near = samples
            self._envelopes = self._found_envelopes(samples)
        more = samples - self._near
        return {
            k: max(num_bytes + more * per_sample for per_sample, num_bytes in lines)
            for k, lines in self._envelopes.items()
        }

    def moments(self, samples: int) -> Mapping[int, Moment]:
        """Largest moments with so many samples, by k; of equal ones the first."""
        if self._read_last is None or self._read_last[0] != samples:
            largest: dict[int, Moment] = {}

            def keep_if_largest(k: int, num_bytes: float, moment: Callable[[], Moment]) -> None:
                if k not in largest or num_bytes > largest[k].num_bytes:
                    largest[k] = moment()

            self._read(samples, keep_if_largest)
            self._read_last = samples, largest
        return self._read_last[1]

    def _found_envelopes(self, samples: int) -> dict[int, list[_Line]]:
        """Moments that are the largest with some number of samples, by k, with their bytes for so many."""
        near, far = list[tuple[int, float]](), list[tuple[int, float]]()
        self._read(samples, lambda k, num_bytes, _: near.append((k, num_bytes)))
        self._read(samples + MOST_SAMPLES, lambda k, num_bytes, _: far.append((k, num_bytes)))
        lines: dict[int, set[_Line]] = {}
        for (k, num_bytes), (_, later_bytes) in zip(near, far, strict=True):
            lines.setdefault(k, set()).add(_Line((later_bytes - num_bytes) / MOST_SAMPLES, num_bytes))
        return {k: _upper_envelope(of_k, samples) for k, of_k in lines.items()}


def _upper_envelope(lines: Iterable[_Line], samples: int) -> list[_Line]:
    """Lines, with bytes for so many samples, that are above all others with some number of samples."""

    def meet(line: _Line, steeper: _Line) -> float:
        return (line.num_bytes - steeper.num_bytes) / (steeper.per_sample - line.per_sample)

    envelope: list[_Line] = []
    for line in sorted(lines):
        while envelope and (
            # above the other from no samples on
            envelope[-1].num_bytes - line.num_bytes <= samples * (envelope[-1].per_sample - line.per_sample)
            or (len(envelope) > 1 and meet(envelope[-2], line) <= meet(*envelope[-2:]))
        ):
            envelope.pop()
        envelope.append(line)
    return envelope


def read_all_sharded(step: Step, tell: Teller, *, modes: Sequence[Treatment], engine: FSDP2) -> None:
    """Tells of every moment of a step in these modes: ZDP, but of units that move activations whatever is chosen.

    k is the number of units of `leaving_order` that are freed at a moment; the optimizer step has `UPDATE`.
    """
    num_freed = 0  # at the moment that is being read

    def observe(num_bytes: float, moment: Callable[[], Moment]) -> None:
        tell(num_freed, num_bytes, moment)

    live = engine.live_parts(step, observe, modes=modes, is_bound=True)
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
    num_freed = UPDATE
    live.update()


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
