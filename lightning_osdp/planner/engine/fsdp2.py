"""`FSDP2`: ``fully_shard`` with its settings, as cost, simulation and search ask it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from typing_extensions import Self

from lightning_osdp.core.axes import Treatment, freed_and_kept
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.plans.plan import PREFETCH_CHOICES, Plan
from lightning_osdp.core.profile import OptimizerProfile, Rerun
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.engine.effects import Effects, effects_in, effects_of
from lightning_osdp.planner.engine.events import COPY, EXCHANGES, Collective, Event
from lightning_osdp.planner.engine.layout import Layout, gathered_bytes, layout, sent_bytes
from lightning_osdp.planner.engine.live_parts import LiveParts, Observer
from lightning_osdp.planner.engine.schedule import MOST_SIMULATED, Host, turns_of

Auto = Literal["auto"]
AUTO: Auto = "auto"
"""A prefetch that is still to be chosen, see `FSDP2.alternatives`."""


@dataclass(frozen=True, kw_only=True)
class FSDP2:
    """Torch's ``fully_shard`` with its settings of prefetching, which are fields of a `Plan` by the same names.

    Units are groups of parameters, each sharded along its rows; modules stay as they are.

    Raises:
        ConfigurationError: there is no such backward prefetch.
    """

    backward_prefetch: str = "pre"
    """Moment at which backward gathers the unit that comes next: one of `PREFETCH_CHOICES`; ``auto``: to be chosen."""
    forward_prefetch: bool | Auto = False
    """True if forward gathers the next unit before one runs; or ``auto``."""
    asynchronous_unshard: bool = True
    """True if all-gathers are issued so that computing may go on, and their buffers are gone sooner. They then begin
    where the host has issued them: without `forward_prefetch` nothing is computed beside those of forward."""
    late_forward: tuple[str, ...] = ()
    """Units, by name, that are gathered when forward comes to them, whatever `forward_prefetch` says of the others."""
    late_backward: tuple[str, ...] = ()
    """Units, by name, that are gathered when backward comes to them."""

    def __post_init__(self) -> None:
        choices = (*PREFETCH_CHOICES, AUTO)
        if self.backward_prefetch not in choices:
            raise ConfigurationError(f"backward_prefetch must be one of {choices}, got {self.backward_prefetch!r}.")

    def alternatives(self, *, overlaps: bool, has_streams: bool = True) -> tuple[Self, ...]:
        """Engines with every setting that may be best; this one alone where nothing is left to choose.

        With asynchronous unsharding and all units gathered ahead; or with synchronous, if forward is to be chosen.
        Synchronous all-gathers begin by themselves while forward computes, a unit earlier, and hold one more buffer:
        neither is better for all models. To gather ahead explicitly besides makes those no earlier.
        Where nothing overlaps, all prefetches take the same time, and none takes the least memory. Without streams, as
        on CPU, the host waits for synchronous all-gathers: they overlap with nothing.
        """
        overlaps = overlaps and (has_streams or self.asynchronous_unshard)
        backward = self.backward_prefetch
        if backward == AUTO:
            backward = "pre" if overlaps else "none"
        ahead = replace(self, backward_prefetch=backward, forward_prefetch=self.forward_prefetch is True)
        if self.forward_prefetch != AUTO or not overlaps:
            return (ahead,)
        explicit, implicit = replace(ahead, forward_prefetch=True), replace(ahead, asynchronous_unshard=False)
        if not has_streams:
            return (explicit,)
        return (explicit, implicit) if self.asynchronous_unshard else (implicit,)

    def without_prefetch(self, chosen: Self) -> Self:
        """One of the `alternatives`, gathering ahead as little as these settings allow.

        Between the two are settings in which some units are gathered ahead.
        """
        return replace(
            chosen,
            backward_prefetch="none" if self.backward_prefetch == AUTO else chosen.backward_prefetch,
            forward_prefetch=chosen.forward_prefetch if self.forward_prefetch != AUTO else False,
        )

    def gathering_late(self, forward: Sequence[str], backward: Sequence[str]) -> Self:
        """Engine with units, by name, that are not gathered ahead in forward, and others that are not in backward."""
        return replace(self, late_forward=tuple(forward), late_backward=tuple(backward))

    @property
    def all_ahead(self) -> Self:
        """Engine with all units gathered ahead where any are."""
        return self.gathering_late((), ())

    @property
    def prefetches(self) -> bool:
        """True if any units are gathered ahead."""
        return self.backward_prefetch == "pre" or self.forward_prefetch is True

    @property
    def most_lingering(self) -> int:
        """Number of extra all-gather buffers alive while a unit runs forward.

        One is the previous unit's, where unsharding is synchronous, and one the prefetched unit's.
        """
        return (not self.asynchronous_unshard) + (self.forward_prefetch is True)

    def copies_beside(self, cluster: Cluster) -> bool:
        """Tells if shards on the host are copied beside computing: asynchronous all-gathers copy in its stream.

        One rank sends nothing, and copies in a stream of its own in any case.
        """
        return cluster.host_copies_overlap and (cluster.world_size == 1 or not self.asynchronous_unshard)

    def may_wait(self, unit: UnitProfile) -> bool:
        """Tells if the unit may reduce its gradients in the last micro-batch only.

        Not if forward calls it more than once: gradients of earlier micro-batches would then be reduced separately.
        """
        return len(unit.calls) == 1

    def all_gather_bytes(self, unit: UnitProfile, num_shards: int) -> float:
        """Bytes of the whole tensor that an all-gather of the unit, sharded over so many ranks, makes."""
        return gathered_bytes(unit, num_shards)

    def reduce_scatter_bytes(self, unit: UnitProfile, num_shards: int) -> float:
        """Bytes of the whole tensor that its reduce-scatter takes; 0 where all of it is frozen."""
        return sent_bytes(unit, num_shards)

    def layout(
        self,
        units: Sequence[UnitProfile],
        optimizer: OptimizerProfile,
        shards: int | Sequence[int],
        *,
        on_host: Sequence[bool] = (),
        shards_on_host: Sequence[bool] = (),
        pins: bool = False,
        rank: int | None = None,
    ) -> Layout:
        """Bytes of units on one rank.

        Args:
            units: of the model.
            optimizer: its step.
            shards: the number of ranks that all units are sharded over, or that of each.
            on_host: of each unit, whether its states are on the host; none: nowhere.
            shards_on_host: of each unit, whether its shard is there; none: nowhere.
            pins: whether copies and shards on the host are pinned.
            rank: whose bytes; None: for state and temporaries together, those of the rank that has most.
        """
        each = (shards,) * len(units) if isinstance(shards, int) else tuple(shards)
        hosted, kept = (tuple(given) or (False,) * len(units) for given in (on_host, shards_on_host))
        return layout(tuple(units), optimizer, each, rank or 0, hosted, shards_on_host=kept, pins=pins)

    def layout_in(self, step: Step, modes: Sequence[Treatment], *, rank: int | None = None) -> Layout:
        """Bytes of a step's units in these modes; without any, over all ranks and with nothing on the host."""
        return self.layout(
            step.units,
            step.profile.optimizer,
            num_shards(step, modes),
            on_host=[effects_of(mode).updates_on_host for mode in modes],
            shards_on_host=[effects_of(mode).shard_on_host for mode in modes],
            pins=step.cluster.host_copies_overlap,
            rank=rank,
        )

    def live_parts(
        self,
        step: Step,
        observer: Observer,
        *,
        modes: Sequence[Treatment],
        rank: int | None = None,
        is_bound: bool = False,
    ) -> LiveParts:
        """Returns a reader of events as bytes.

        Args:
            step: whose events are read.
            observer: told of every moment.
            modes: of its units, which say what they are sharded over.
            rank: whose bytes; None: those of the rank that holds most.
            is_bound: whether what follows is to hold whatever the modes of other units.
        """
        return LiveParts(
            step,
            observer,
            layout=self.layout_in(step, modes, rank=rank),
            shards=num_shards(step, modes),
            resident=[unit for unit, mode in enumerate(modes) if effects_of(mode).is_resident],
            exchanging=[unit for unit, mode in enumerate(modes) if effects_of(mode).exchanges],
            asynchronous_unshard=self.asynchronous_unshard,
            is_bound=is_bound,
        )

    def micro_batches(
        self, units: Sequence[UnitProfile], effects: Sequence[Effects], **of_step: Any
    ) -> list[list[Event]]:
        """Events of forward, loss and backward in the first, a steady and the last micro-batch, as many as there are.

        Arguments are those of `hosts`.
        """
        return [host.events for host in self.hosts(units, effects, **of_step)]

    def hosts(
        self,
        units: Sequence[UnitProfile],
        effects: Sequence[Effects],
        *,
        num_segments: int,
        rerun: Mapping[str, Rerun],
        num_micro_batches: int = 1,
        merges_calls: bool = False,
    ) -> Iterator[Host]:
        """The host after each of these micro-batches, with the events of that one.

        Args:
            units: root first, if any, then in forward order.
            effects: of each unit's treatment.
            num_segments: of the model, the loss included.
            rerun: blocks that recompute.
            num_micro_batches: in an optimizer step.
            merges_calls: whether a unit that forward calls again is taken as gathered from its first call to its last.
        """
        if AUTO in {self.backward_prefetch, self.forward_prefetch}:
            raise ValueError("A prefetch that is 'auto' runs nothing: ask for alternatives().")
        host = Host(
            units=units,
            turns=turns_of(
                tuple(units),
                num_segments,
                tuple(rerun.items()),
                merges_calls=merges_calls,
                backward_prefetch=self.backward_prefetch,
                forward_prefetch=self.forward_prefetch is True,
            ),
            effects=effects,
            late_forward=self.late_forward,
            late_backward=self.late_backward,
        )
        num_simulated = min(MOST_SIMULATED, num_micro_batches)
        for index in range(num_simulated):
            host.micro_batch(is_first=index == 0, is_last=index == num_simulated - 1)
            yield host

    def events_of(self, step: Step, modes: Sequence[Treatment]) -> list[list[Event]]:
        """Events of the micro-batches that are simulated, with these modes, one per unit."""
        return self.micro_batches(
            step.units,
            effects_in(step, modes),
            num_micro_batches=step.workload.num_micro_batches,
            num_segments=len(step.profile.segments),
            rerun=step.profile.rerun,
        )


def planned_collectives(unit: Unit, num_micro_batches: int) -> Iterator[tuple[Collective, int, float]]:
    """Collectives of a unit of a plan in an optimizer step, after the first: how many, and bytes of each whole tensor.

    Exchanges of activations are left out, but not sums of gradients between nodes, and so are copies from the host. A
    module that forward calls more than once, and a unit inside of a block that is run again, are counted as any other;
    bytes are without paddings.
    """
    gradient_bytes = unit.parameter_bytes if unit.gradient_bytes is None else unit.gradient_bytes
    for mode in unit.treatments:
        effects = effects_of(mode if unit.name else freed_and_kept(mode)[1])  # the root is never freed
        counts = effects.collectives(unit, num_micro_batches=num_micro_batches)
        for collective, number in counts.items():
            if collective.operation in EXCHANGES or collective is COPY:
                continue
            whole_bytes = unit.parameter_bytes if collective.operation == "all_gather" else gradient_bytes
            yield collective, number, whole_bytes / unit.num_slices


def num_shards(step: Step, modes: Sequence[Treatment]) -> tuple[int, ...]:
    """The number of ranks that each unit of a step is sharded over in these modes; without any, all ranks."""
    if not modes:
        return (step.cluster.world_size,) * len(step.units)
    return tuple(step.cluster.num_ranks(effects_of(mode).sharded_over) for mode in modes)


DEFAULT = FSDP2()
"""Engine of a step where nothing else is said."""


def engine_of(plan: Plan) -> FSDP2:
    """``fully_shard`` with a plan's settings."""
    return FSDP2(**{field.name: getattr(plan, field.name) for field in fields(FSDP2)})
