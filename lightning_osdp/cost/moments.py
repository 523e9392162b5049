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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.batch_policy import MOST_SAMPLES
from lightning_osdp.core.profile import Rerun
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine import FSDP2, MOST_SIMULATED, Effects, Event, Moment, effects_of, leaving_order

UPDATE = -1
"""The optimizer step, among moments by k."""


@dataclass(frozen=True)
class MomentLine:
    """One moment of steps that differ in nothing but the samples of a micro-batch."""

    samples: int
    moment: Moment
    """The moment with so many samples."""
    later: Moment | None = None
    """The moment with `MOST_SAMPLES` more; None where the first is all that is known."""

    @property
    def per_sample(self) -> float:
        """Bytes that each sample adds."""
        return 0.0 if self.later is None else (self.later.num_bytes - self.moment.num_bytes) / MOST_SAMPLES

    def num_bytes(self, samples: int) -> float:
        """Bytes alive with so many samples."""
        return self.moment.num_bytes + (samples - self.samples) * self.per_sample

    def at(self, samples: int) -> Moment:
        """The moment with so many samples."""
        if self.later is None or samples == self.samples:
            return self.moment
        share = (samples - self.samples) / MOST_SAMPLES
        parts = {
            part: num_bytes + share * (self.later.parts[part] - num_bytes)
            for part, num_bytes in self.moment.parts.items()
        }
        return replace(self.moment, num_bytes=self.num_bytes(samples), parts=parts)


class LargestMoments:
    """Largest moments of steps that differ in nothing but the samples of a micro-batch.

    The first is read for its own samples alone. For any other, the events are read twice, and what may be the largest
    moment of any samples is known from then on.

    Args:
        make: makes such a step, with what its modes decide of blocks.
        modes: ZDP, but of units that move activations in all modes that are asked for.
        engine: runs the step.
        is_affine: whether bytes are affine in the samples; else each number of samples is read for itself.
    """

    def __init__(
        self, make: Callable[[], Step], modes: Sequence[Treatment], engine: FSDP2, *, is_affine: bool = True
    ) -> None:
        self._make, self._modes, self._engine, self._is_affine = make, modes, engine, is_affine
        self._first: tuple[int, dict[int, MomentLine]] | None = None
        self._envelopes: dict[int, list[MomentLine]] = {}

    def at(self, samples: int) -> dict[int, MomentLine]:
        """Largest moments with so many samples.

        Returns:
            By k, the largest moment at which the first k units of `leaving_order` are freed; there is none for a k at
            which nothing happens. And the optimizer step, as `UPDATE`.
        """
        if self._first is None or (samples != self._first[0] and not self._is_affine):
            self._first = samples, self._largest(samples)
        if samples == self._first[0]:
            return self._first[1]
        if not self._envelopes:
            self._envelopes = self._found_envelopes(self._first[0])
        return {
            k: max(lines, key=lambda line: line.num_bytes(samples)) if len(lines) > 1 else lines[0]
            for k, lines in self._envelopes.items()
        }

    def _largest(self, samples: int) -> dict[int, MomentLine]:
        largest: dict[int, Moment] = {}

        def keep_if_largest(k: int, num_bytes: float, moment: Callable[[], Moment]) -> None:
            if k not in largest or num_bytes > largest[k].num_bytes:
                largest[k] = moment()

        self._read(self._make(), samples, keep_if_largest)
        return {k: MomentLine(samples, moment) for k, moment in largest.items()}

    def _found_envelopes(self, samples: int) -> dict[int, list[MomentLine]]:
        """Moments that are the largest with some number of samples, by k."""
        step, moments = self._make(), list[tuple[int, Moment]]()
        for each in (samples, samples + MOST_SAMPLES):
            self._read(step, each, lambda k, _, moment: moments.append((k, moment())))
        lines: dict[int, list[MomentLine]] = {}
        half = len(moments) // 2
        for (k, moment), (_, later) in zip(moments[:half], moments[half:], strict=True):
            lines.setdefault(k, []).append(MomentLine(samples, moment, later))
        return {k: _upper_envelope(of_k) for k, of_k in lines.items()}

    def _read(self, step: Step, samples: int, observer: Callable[[int, float, Callable[[], Moment]], object]) -> None:
        """Tells an observer of every moment of a step with so many samples, with its k."""
        step = replace(step, workload=replace(step.workload, micro_batch_size=samples))
        num_freed = 0  # at the moment that is being read

        def observe(num_bytes: float, moment: Callable[[], Moment]) -> None:
            observer(num_freed, num_bytes, moment)

        live = self._engine.live_parts(step, observe, modes=self._modes, is_bound=True)
        simulated = _events(
            step.units,
            tuple(effects_of(mode) for mode in self._modes),
            num_micro_batches=min(MOST_SIMULATED, step.workload.num_micro_batches),
            num_segments=len(step.profile.segments),
            rerun=tuple(step.profile.rerun.items()),
            engine=self._engine,
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


def _upper_envelope(lines: Iterable[MomentLine]) -> list[MomentLine]:
    """Lines that are above all others with some number of samples; of equal ones the first."""

    def fixed(line: MomentLine) -> float:
        return line.num_bytes(0)

    def samples_where_meet(line: MomentLine, steeper: MomentLine) -> float:
        return (fixed(line) - fixed(steeper)) / (steeper.per_sample - line.per_sample)

    envelope: list[MomentLine] = []
    numbered = sorted(enumerate(lines), key=lambda each: (each[1].per_sample, fixed(each[1]), -each[0]))
    for _, line in numbered:
        while envelope and (
            fixed(envelope[-1]) <= fixed(line)
            or (len(envelope) > 1 and samples_where_meet(envelope[-2], line) <= samples_where_meet(*envelope[-2:]))
        ):
            envelope.pop()
        envelope.append(line)
    return envelope


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
