"""Peak of live bytes in one optimizer step, in closed form, as a function of the modes.

With the units in the order in which forward leaves them, x_u = 1 where unit u is kept gathered (DP), P_u its gathered
bytes, and floor_k the largest moment of an all-ZDP step at which the first k units are freed (`moments`):

    peak(x) = max_k ( floor_k + sum over the first k units of x_u P_u )

"At most the limit" is therefore a family of knapsack constraints, one per k, each on a prefix of the next one's units.

With several micro-batches, y_u = 1 where unit u reduces its gradients in the last one only: from the first one on it
has S_u whole gradient bytes in place of s_u reduced ones and, if it is DP, P_u gathered bytes. These count at every k:

    peak(x, y) = max_k ( floor_k + sum over the first k units of x_u (1 - y_u) P_u
                                 + sum over all units of y_u (S_u - s_u + x_u P_u) )

A resident unit holds P_u, less what its shard has of that, all the time: at every k, and while the optimizer steps.
Another unit is gathered ahead in its place, which may be larger: that is left out.

An hpZ unit holds P_u / m while it is freed, on m ranks of a node; so it does until it is copied out again, and under
mixed precision it is copied before, which is left out here. One that is sharded in the node holds more at every k:
its shard, state and reduced gradient are those of one of m ranks in place of N. Its copies are larger in that ratio,
too, which is left out.

Where the states of a unit, or its shard, may be on the host, floor_k is without them, and the unit holds them at every
k where they are on the device, and with a shard its reduced gradient. Temporaries of updates are left out, and that
less is copied for all-gathers then.

Where a unit is a block that may recompute or offload, it saves A_u bytes beyond the fewest that it may save, from where
forward has left it to where backward comes back: they count as x_u P_u does. floor_k is then the largest moment of
any choice, without its A_u, and with what any two of the blocks may have in flight to the host. A block that is
gathered ahead is not freed: while the next one runs backward, it counts as if it made that one's choice, and bytes
that it saves beyond that are left out.

A unit that moves activations holds what its operators save beyond the rest, E_u, from forward to backward, as x_u P_u.
Tensors that it holds while it runs are left out. floor_k has the weights that it would gather, except where it is known
to move activations: floor_k is then that of a step in which it does.

A bound, for not all of these are alive at the same time as the rest: floor_k has P_u of the units that run then, kept
or not; the first micro-batch has not made all gradients yet, and the last one has reduced some.
`exact_peak` has it exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from lightning_osdp.core.axes import KEEP, ZDP, Treatment
from lightning_osdp.core.profile import ModelProfile, OptimizerProfile
from lightning_osdp.core.step import Step, Workload
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.cost.moments import UPDATE, LargestMoments, Teller, read_all_sharded
from lightning_osdp.planner.cost.terms import is_ahead
from lightning_osdp.planner.engine import (
    DEFAULT,
    FSDP2,
    MOST_SIMULATED,
    Effects,
    Moment,
    block_effects,
    effects_of,
    in_flight_bytes,
    in_modes,
    leaving_order,
    saved_beyond,
    stays_bytes,
    with_activations,
)

PINNED = 2
"""Most host memory that pinned tensors take over their bytes, see `engine.layout.pinned_bytes`."""

ROUNDING_BYTES = 1e-3
"""Bytes that the rounding of sums may add to a peak, which is else rounded up to whole bytes."""


def peak_bytes_of(num_bytes: float) -> int:
    """Bytes of a peak, rounded up to whole ones."""
    return math.ceil(num_bytes - ROUNDING_BYTES)


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """The largest phase of a step."""

    peak_bytes: int
    phase: str
    """``forward``, ``backward``, ``reduce-scatter`` or ``optimizer step``."""
    operator: str
    """Operator that runs at the peak; the empty string in the loss and in the optimizer step."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Parts of the peak, in bytes."""

    @classmethod
    def of(cls, moment: Moment, *, besides: Mapping[str, float] | None = None) -> PeakMemory:
        """The peak at this moment, with so many bytes of other things alive; whole bytes, rounded up."""
        more = besides or {}
        parts = {part: moment.parts.get(part, 0.0) + more.get(part, 0.0) for part in (*moment.parts, *more)}
        return cls(
            peak_bytes=peak_bytes_of(moment.num_bytes + sum(more.values())),
            phase=moment.phase,
            operator=moment.operator,
            parts={part: round(num_bytes) for part, num_bytes in parts.items() if round(num_bytes)},
        )


class Held(NamedTuple):
    """Bytes that a unit holds beyond those of one that is ZDP and reduces its gradients in every micro-batch."""

    prefix_bytes: float
    """Bytes from where forward has left the unit to where backward comes back to the unit."""
    window_bytes: float
    """Bytes all the time, from one micro-batch to the next."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The peak of one step for any choice of modes."""

    order: tuple[int, ...]
    """Units other than the root, as positions among all units, in the order in which forward leaves them."""
    gathered_bytes: tuple[float, ...]
    """P of each unit in that order: what it takes to keep it while ZDP would free it."""
    shared_bytes: tuple[float, ...]
    """Bytes of each that its shard has as well where it is resident, in the order of `gathered_bytes`."""
    whole_bytes: tuple[float, ...]
    """S - s of each: what it takes to have its gradients whole from one micro-batch to the next."""
    summed_bytes: tuple[tuple[float, float], ...] = ()
    """Bytes of each beside its reduced gradients that an all-reduce of them leaves while backward goes on, where every
    micro-batch does that, and where the last one does: gradients that are cast then, or added to earlier ones."""
    saved_bytes: tuple[Mapping[str, float], ...]
    """A of each: what a choice of activations saves beyond the one that saves least; empty where there is no choice."""
    largest_bytes: Mapping[int, float]
    """k -> bytes of the largest moment at which exactly the first k of them are freed; none where nothing happens then.
    The optimizer step, where all units are sharded over all ranks, is `UPDATE`, if there is such a moment."""
    moment: Callable[[int], Moment]
    """Finds the moment itself by its k, which may take longer than all other questions."""
    node_size: int = 1
    """Ranks of a node, in each of which an hpZ unit leaves P / node_size."""
    states_bytes: tuple[Mapping[tuple[str, bool, bool], float], ...] = ()
    """Bytes of each unit's shard, state and reduced gradient, in the order of all units, by the ranks that the unit is
    sharded over and by whether its states, and its shard, are on the host: beyond those over all ranks, with both on
    the host where they may be. Empty where none can differ."""
    reduced_bytes: tuple[float, ...] = ()
    """s of each, which is on the host where the shard is; empty where none may be there."""
    exchanged_bytes: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """E of each unit that may move activations, by its position among all units and the ranks that it is over."""

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Unit -> its place in `order`."""
        return {unit: place for place, unit in enumerate(self.order)}

    @cached_property
    def _held(self) -> list[dict[Treatment, Held]]:
        """Answers of `held` so far, by place."""
        return [{} for _ in self.order]

    def held(self, place: int, mode: Treatment) -> Held:
        """Bytes that the unit at this place of `order` holds in a mode."""
        known = self._held[place]
        found = known.get(mode)
        if found is None:
            found = known[mode] = self._holds(place, mode)
        return found

    def _holds(self, place: int, mode: Treatment) -> Held:
        effects, saved = effects_of(mode), self.saved_bytes[place].get(mode["saves"], 0.0)
        left = self._left_bytes(place, effects)
        always = self.more_states_bytes(self.order[place], mode) + (left if effects.stays else 0.0)
        always += self._whole_bytes(place, effects) + self._summed_bytes(place, effects)
        return Held(saved if effects.stays else saved + left, always)

    def _whole_bytes(self, place: int, effects: Effects) -> float:
        """Bytes by which gradients that are whole between micro-batches exceed reduced ones on the device."""
        if not effects.holds_whole_gradients or effects.is_replicated:
            return 0.0
        return self.whole_bytes[place] + (self.reduced_bytes[place] if effects.shard_on_host else 0.0)

    def _summed_bytes(self, place: int, effects: Effects) -> float:
        """Bytes that an all-reduce of a unit that each rank has all of leaves until backward is over."""
        if not effects.is_replicated or not self.summed_bytes:  # the paper has no such units
            return 0.0
        every, last = self.summed_bytes[place]
        return last if effects.holds_whole_gradients else every

    def _left_bytes(self, place: int, effects: Effects) -> float:
        """Bytes that forward leaves of a unit, or of its inputs, beyond what is there between steps."""
        if effects.exchanges:
            return self.exchanged_bytes.get((self.order[place], effects.sharded_over), 0.0)
        if effects.left_over == effects.sharded_over:
            return 0.0
        if effects.is_resident:
            return self.gathered_bytes[place] - self.shared_bytes[place]
        return self.gathered_bytes[place] / (1 if effects.is_kept else self.node_size)

    def held_at(self, num_freed: int, unit: int, mode: Treatment) -> float:
        """Bytes of one unit when the first ``num_freed`` are freed."""
        place = self.places.get(unit)
        if place is None:  # the root
            return self.more_states_bytes(unit, mode)
        held = self.held(place, mode)
        return held.window_bytes + (held.prefix_bytes if place < num_freed else 0.0)

    def more_states_bytes(self, unit: int, mode: Treatment) -> float:
        """Bytes of a unit's shard, state and reduced gradient beyond the least, see `states_bytes`."""
        if not self.states_bytes:
            return 0.0
        effects = effects_of(mode)
        return self.states_bytes[unit][effects.sharded_over, effects.updates_on_host, effects.shard_on_host]

    def kept_bytes(self, modes: Sequence[Treatment]) -> list[float]:
        """Bytes that units hold with these modes, one per unit, when the first k are freed, for k = 0, 1, ..."""
        held = [self.held(place, modes[unit]) for place, unit in enumerate(self.order)]
        roots = set(range(len(modes))).difference(self.order)
        always = sum(each.window_bytes for each in held)
        always += sum(self.more_states_bytes(unit, modes[unit]) for unit in roots)
        return list(accumulate((each.prefix_bytes for each in held), initial=always))

    def room_bytes(self, memory_limit_bytes: int) -> list[float]:
        """Bytes that units may hold, for k = 0, 1, ...; never falling with k, for what they hold never does.

        Modes fit where ``kept_bytes(modes)[k]`` is at most that for every k, and the optimizer step does.
        """
        rooms = {
            k: memory_limit_bytes + ROUNDING_BYTES - num_bytes
            for k, num_bytes in self.largest_bytes.items()
            if k != UPDATE
        }
        falling = [rooms.get(k, math.inf) for k in range(len(self.order), -1, -1)]
        return list(accumulate(falling, min))[::-1]

    def peak_bytes(self, modes: Sequence[Treatment]) -> int:
        """Bytes of `peak`."""
        return peak_bytes_of(self._largest(modes)[1])

    def _largest(self, modes: Sequence[Treatment]) -> tuple[int, float]:
        """The k of the largest moment with these modes, one per unit, and its bytes."""
        kept = self.kept_bytes(modes)
        totals = {k: num_bytes + kept[k] for k, num_bytes in self.largest_bytes.items() if k != UPDATE}
        k = max(totals, key=totals.__getitem__)
        if UPDATE in self.largest_bytes:
            update_bytes = self.largest_bytes[UPDATE] + self._states_bytes(modes) + self._resident_bytes(modes)
            if update_bytes >= totals[k]:
                return UPDATE, update_bytes
        return k, totals[k]

    def _states_bytes(self, modes: Sequence[Treatment]) -> float:
        return sum(self.more_states_bytes(unit, mode) for unit, mode in enumerate(modes))

    def _resident_bytes(self, modes: Sequence[Treatment]) -> float:
        return sum(
            self._left_bytes(place, effects)
            for place, unit in enumerate(self.order)
            if (effects := effects_of(modes[unit])).is_resident
        )

    def peak(self, modes: Sequence[Treatment]) -> PeakMemory:
        """The largest moment with these modes, one per unit."""
        k, _ = self._largest(modes)
        states = self._states_bytes(modes)
        replicated = {"parameter shards": states}  # with what belongs to them
        if k == UPDATE:
            resident = {"gathered parameters": self._resident_bytes(modes)}
            return PeakMemory.of(self.moment(UPDATE), besides=replicated | resident)
        chosen = [modes[unit] for unit in self.order]
        whole = sum(self._whole_bytes(place, effects_of(mode)) for place, mode in enumerate(chosen))
        summed = sum(self._summed_bytes(place, effects_of(mode)) for place, mode in enumerate(chosen))
        saved = sum(
            of_choice.get(mode["saves"], 0.0) for mode, of_choice in zip(chosen[:k], self.saved_bytes[:k], strict=True)
        )
        saved += sum(
            self.exchanged_bytes.get((unit, effects.sharded_over), 0.0)
            for unit in self.order[:k]
            if (effects := effects_of(modes[unit])).exchanges
        )
        besides = {
            "gathered parameters": self.kept_bytes(modes)[k] - whole - summed - saved - states,
            "accumulated gradients": whole,
            "reduced gradients": summed,
            "activations": saved,
        }
        return PeakMemory.of(self.moment(k), besides=besides | replicated)


def exact_peak(step: Step, modes: Sequence[Treatment], *, engine: FSDP2 = DEFAULT) -> PeakMemory:
    """Peak of one optimizer step in these modes, one per unit, event by event."""
    return PeakMemory.of(exact_moments(step, modes, engine=engine).moments(step.workload.micro_batch_size)[0])


def exact_moments(step: Step, modes: Sequence[Treatment], *, engine: FSDP2) -> LargestMoments:
    """The largest moment, as that of k = 0, of a step in these modes with any number of samples, event by event."""

    def read(sized: Step, tell: Teller) -> None:
        live = engine.live_parts(sized, lambda num_bytes, moment: tell(0, num_bytes, moment), modes=modes)
        live.read_all(engine.events_of(sized, modes))

    return _moments_of(step, modes, {}, read)


def step_memory(
    step: Step,
    *,
    activations: Sequence[str] = (KEEP,),
    moving: Mapping[int, Treatment] = MappingProxyType({}),
    hosted: Mapping[int, Treatment] = MappingProxyType({}),
    engine: FSDP2 = DEFAULT,
    known: MutableMapping[Hashable, LargestMoments] | None = None,
) -> StepMemory:
    """Peak of one optimizer step on one rank, for any choice of modes, and of what its blocks may do by `activations`.

    In the step itself all blocks keep what they save. Units at the places ``moving`` are treated so, and move
    activations, whatever the modes; those at ``hosted`` are treated so with all on the host that may be. Largest
    moments that are
    ``known`` of the step with other micro-batch sizes are not looked for again; those that are found are added.
    """
    least = [moving[unit] if unit in moving else hosted.get(unit, ZDP) for unit in range(len(step.units))]
    profile, units, samples = step.profile, step.units, step.workload.micro_batch_size
    order, sizes = leaving_order(units), engine.layout(units, profile.optimizer, step.cluster.world_size).units
    wholes = engine.layout(units, profile.optimizer, 1).units
    saved = [_saved_beyond(units[unit], activations, samples) for unit in order]
    in_flight = in_flight_bytes(step.cluster, _copied(step, activations))
    over_ranks = {over: step.cluster.num_ranks(over) for over in ("all", "node", "one")}
    known = {} if known is None else known
    largest: dict[int, _Floor] = {}
    for choice in [each for each in activations if any(each in of for of in saved)] or activations[:1]:
        blocks = _all_alike(units, choice, dict(zip(order, saved, strict=True)))
        key = *key_of_moments(step, engine), tuple(least), tuple(blocks.items())
        if key not in known:
            known[key] = _moments_of(step, least, blocks, partial(read_all_sharded, modes=least, engine=engine))
        before = list(accumulate((each.get(choice, 0.0) for each in saved), initial=0.0))
        copies = 0.0
        if step.cluster.host_copies_overlap:
            copies = max(moment.parts["copies in flight"] for moment in known[key].moments(samples).values())
        for k, num_bytes in known[key].num_bytes(samples).items():
            less = (0.0, 0.0) if k == UPDATE else (before[k], copies - in_flight)
            floor_bytes = num_bytes - less[0] - less[1]
            if k not in largest or floor_bytes > largest[k].num_bytes:
                largest[k] = _Floor(floor_bytes, known[key], *less)

    states = _more_states(
        units,
        profile.optimizer,
        tuple(over_ranks.items()),
        tuple(_on_host(hosted.get(unit, ZDP)) for unit in range(len(units))),
        engine,
    )

    def moment(k: int) -> Moment:
        floor = largest[k]
        found = floor.moments.moments(samples)[k].less("activations", floor.less_saved)
        return found.less("copies in flight", floor.less_copies)

    return StepMemory(
        order=order,
        gathered_bytes=tuple(sizes[unit].gathered for unit in order),
        shared_bytes=tuple(sizes[unit].shared for unit in order),
        # with paddings a shard may be larger than what it is a shard of
        whole_bytes=tuple(max(0.0, sizes[unit].whole_gradient - sizes[unit].reduced) for unit in order),
        reduced_bytes=tuple(sizes[unit].reduced for unit in order),
        summed_bytes=tuple(_summed(wholes[unit].scattered, wholes[unit].reduced, step) for unit in order),
        node_size=step.cluster.node_size or 1,
        saved_bytes=tuple(saved),
        largest_bytes={k: floor.num_bytes for k, floor in largest.items()},
        moment=moment,
        exchanged_bytes={
            (unit, over): saved_beyond(each.exchange, number).at(step.workload.micro_batch_size)
            + (sizes[unit].cast_shard * step.cluster.world_size / number if each.exchange.reads_weights else 0.0)
            for unit, each in enumerate(units)
            if each.exchange is not None and unit not in moving
            for over, number in over_ranks.items()
        },
        # the floor has those of units that are known to move activations
        states_bytes=tuple(dict.fromkeys(each, 0.0) if unit in moving else each for unit, each in enumerate(states)),
    )


def _summed(scattered: float, reduced: float, step: Step) -> tuple[float, float]:
    """`StepMemory.summed_bytes` of one unit, of which these are the bytes where each rank has all of it.

    A backend that copies is through with it when the next unit is reduced: what it holds until then is no more than
    what a reduce-scatter receives, but where gradients are cast and added to others.
    """
    is_cast, adds = scattered != reduced, step.workload.num_micro_batches > 1
    if step.cluster.reduce_scatter_copies:
        return (max(scattered, reduced) if is_cast and adds else 0.0), 0.0
    return (scattered if adds or is_cast else 0.0), (scattered if is_cast else 0.0)


class _Floor(NamedTuple):
    """The largest moment of one k, without what units hold."""

    num_bytes: float
    moments: LargestMoments
    less_saved: float
    """Bytes of activations that the units hold, in the choice of all blocks in which the moment is the largest."""
    less_copies: float
    """Bytes in flight to the host beyond those of any choices."""


def key_of_moments(step: Step, engine: FSDP2) -> tuple[Hashable, ...]:
    """Key of what `LargestMoments` are of, but for modes: equal for steps that differ in the samples alone."""
    num_simulated = min(MOST_SIMULATED, step.workload.num_micro_batches)
    return id(step.profile), id(step.cluster), step.units, engine, num_simulated


def _moments_of(
    step: Step, modes: Sequence[Treatment], blocks: Mapping[str, str], read: Callable[[Step, Teller], None]
) -> LargestMoments:
    """Largest moments of a step in these modes whose blocks make these choices, as ``read`` tells of its moments.

    Nothing else of a setting lives on.
    """
    profile, units, cluster = step.profile, step.units, step.cluster
    num_micro_batches = step.workload.num_micro_batches

    @cache
    def chosen() -> ModelProfile:
        return with_activations(profile, blocks)

    def read_sized(samples: int, tell: Teller) -> None:
        workload = Workload(micro_batch_size=samples, num_micro_batches=num_micro_batches)
        read(in_modes(Step(profile=chosen(), units=units, cluster=cluster, workload=workload), modes), tell)

    # what may be in flight to the host is not affine in the samples, nor what exchanges send
    is_affine = not cluster.host_copies_overlap and not any(effects_of(mode).exchanges for mode in modes)
    return LargestMoments(read_sized, is_affine=is_affine)


def _on_host(mode: Treatment) -> tuple[bool, bool]:
    """Tells if a unit's states are on the host in a mode, and if its shard is."""
    effects = effects_of(mode)
    return effects.updates_on_host, effects.shard_on_host


@lru_cache(maxsize=64)
def _more_states(
    units: tuple[UnitProfile, ...],
    optimizer: OptimizerProfile,
    over: tuple[tuple[str, int], ...],
    least: tuple[tuple[bool, bool], ...],
    engine: FSDP2,
) -> tuple[Mapping[tuple[str, bool, bool], float], ...]:
    """`StepMemory.states_bytes` of each unit, over so many ranks of each kind.

    Gradients that micro-batches have scattered in the node alone take the place of the reduced gradient, and may be
    wider.
    """

    def states(unit: UnitProfile, num_shards: int, on_host: tuple[bool, bool], *, scatters: bool) -> float:
        of_states, of_shard = on_host
        layout = engine.layout([unit], optimizer, num_shards, on_host=[of_states], shards_on_host=[of_shard])
        (size,) = layout.units
        gradient = max(size.kept_gradient, size.scattered) if scatters else size.kept_gradient
        return layout.shards + layout.optimizer_state + gradient

    found = []
    places = [(states, shard) for states in (False, True) for shard in (False, True)]
    for unit, most_on_host in zip(units, least, strict=True):
        of_all = {on_host: states(unit, dict(over)["all"], on_host, scatters=False) for on_host in places}
        found.append(
            {
                (ranks, *on_host): (
                    least_bytes if ranks == "all" else max(least_bytes, states(unit, number, on_host, scatters=True))
                )
                - of_all[most_on_host]
                for ranks, number in over
                for on_host, least_bytes in of_all.items()
            }
        )
    return tuple(found)


def host_bytes(step: Step, modes: Sequence[Treatment] = ()) -> float:
    """Most host memory that a rank takes in these modes, one per unit: for updates, shards, and what blocks copy.

    Where copies run beside computing, they are pinned: of activations, whose sizes one by one are not known, each is
    taken to need twice its bytes. Without modes, it is what blocks copy whose choices the profile has.
    """
    samples = step.workload.micro_batch_size
    copied = [num_bytes.at(samples) for _, num_bytes in step.profile.copied]
    copied += [block_copied_bytes(step.units[place], mode["saves"], samples) for place, mode in enumerate(modes)]
    return DEFAULT.layout_in(step, modes).host + sum(copied) * (PINNED if step.cluster.host_copies_overlap else 1)


def host_bytes_ahead(step: Step, modes: Sequence[Treatment]) -> float:
    """Host memory of `host_bytes`, with copies of what is there where updates begin in backward, on these copies."""
    copies = DEFAULT.layout_in(step, modes).host_copies if is_ahead(step.profile.optimizer, step.cluster) else 0.0
    return host_bytes(step, modes) + copies


def block_copied_bytes(unit: UnitProfile, choice: str, micro_batch_size: int) -> float:
    """Bytes that the unit's block copies to host memory in a micro-batch; none where the unit is no block."""
    return 0.0 if unit.block is None else block_effects(unit.block, choice).copied_bytes.at(micro_batch_size)


def saved_bytes(unit: UnitProfile, choice: str, micro_batch_size: int) -> float:
    """Bytes that stay on the device from the unit's forward to its backward, at most."""
    if unit.block is None:
        return unit.saved_bytes.at(micro_batch_size)
    if choice == KEEP:
        return (unit.saved_bytes + unit.block.borrowed_bytes).at(micro_batch_size)
    return stays_bytes(unit.block, choice).at(micro_batch_size)


def _copied(step: Step, activations: Sequence[str]) -> Iterator[float]:
    """Bytes that each block copies to host memory, at most."""
    samples = step.workload.micro_batch_size
    yield from (size.at(samples) for _, size in step.profile.copied)
    for unit in step.units:
        yield max(block_copied_bytes(unit, choice, samples) for choice in activations)


def _all_alike(units: Sequence[UnitProfile], choice: str, saved: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    """Blocks -> this choice, or the one that saves least where a block has no such choice."""
    return {
        unit.name: choice if choice == KEEP or _may(unit, choice) else min(of, key=of.__getitem__)
        for index, unit in enumerate(units)
        if (of := saved.get(index))
    }


def _may(unit: UnitProfile, choice: str) -> bool:
    return unit.block is not None and choice in unit.block.segments


def _saved_beyond(unit: UnitProfile, activations: Sequence[str], micro_batch_size: int) -> dict[str, float]:
    """Bytes that the unit saves beyond the choice that saves least, by choice; empty where it has one choice only."""
    choices = [choice for choice in activations if choice == KEEP or _may(unit, choice)]
    if len(choices) < 2:
        return {}
    found = {choice: saved_bytes(unit, choice, micro_batch_size) for choice in choices}
    return {choice: num_bytes - min(found.values()) for choice, num_bytes in found.items()}
