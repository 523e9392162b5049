"""What an engine does in a step, with its settings: the one thing that cost, simulation and search ask.

An engine is whatever shards a module and runs it: the package has one, `FSDP2`. What is particular to it is behind
`Engine`, so that other ones can be described: benchmarks do so of what is compared with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from typing_extensions import Self

from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import OptimizerProfile, Rerun
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine.events import MOST_SIMULATED, Event, GatherRule
from lightning_osdp.engine.host import Course, Host
from lightning_osdp.engine.layout import Layout
from lightning_osdp.engine.live_parts import LiveParts, Observer
from lightning_osdp.errors import ConfigurationError

Auto = Literal["auto"]
AUTO: Auto = "auto"
"""A prefetch that is still to be chosen, see `Engine.alternatives`."""


@dataclass(frozen=True, kw_only=True)
class Engine(ABC):
    """An engine with its settings, which are fields of a `Plan` by the same names.

    Raises:
        ConfigurationError: the engine has no such backward prefetch.
    """

    backward_prefetch: str = "pre"
    """When backward gathers the unit that comes next: one of `prefetches`, or ``auto`` where that is to be chosen."""
    forward_prefetch: bool | Auto = False
    """Whether forward gathers the next unit before one runs; or ``auto``."""

    prefetches: ClassVar[tuple[str, ...]]
    """Settings of backward prefetch, the one first that is preferred where they are equally fast."""

    def __post_init__(self) -> None:
        choices = (*self.prefetches, AUTO)
        if self.backward_prefetch not in choices:
            raise ConfigurationError(f"backward_prefetch must be one of {choices}, got {self.backward_prefetch!r}.")

    @property
    def settings(self) -> Mapping[str, Any]:
        """Fields of a plan."""
        return asdict(self)

    def alternatives(self, *, overlaps: bool) -> tuple[Self, ...]:
        """The engine with every setting that may be best; itself where nothing is left to choose.

        Where nothing overlaps, all prefetches take the same time, and none takes the least memory.

        Args:
            overlaps: whether collectives run beside computing.
        """
        given = replace(self, forward_prefetch=self.forward_prefetch is True)
        if self.backward_prefetch != AUTO:
            return (given,)
        return tuple(replace(given, backward_prefetch=each) for each in (self.prefetches if overlaps else ("none",)))

    def without_prefetch(self, chosen: Self) -> Self:
        """One of the `alternatives` with what is the least that it may gather ahead; itself where that is all.

        Between the two are settings in which some units are gathered ahead.
        """
        return chosen

    def gathering_late(self, forward: Sequence[str], backward: Sequence[str]) -> Self:
        """The engine with these units, by name, not gathered ahead in forward, and those not in backward.

        Raises:
            ValueError: there are any, and the engine gathers all units ahead or none.
        """
        if forward or backward:
            raise ValueError(f"{type(self).__name__} gathers all units ahead or none.")
        return self

    @property
    def all_ahead(self) -> Self:
        """The engine with all units gathered ahead where any are."""
        return self

    @property
    @abstractmethod
    def gathers_wait_for(self) -> GatherRule:
        """What an all-gather waits for where it runs beside computing."""

    @property
    @abstractmethod
    def most_lingering(self) -> int:
        """All-gather buffers of other units that may live while forward runs a unit."""

    @abstractmethod
    def keeps(self, mode: ShardingMode, world_size: int) -> bool:
        """Whether a unit in this mode stays gathered from forward to backward."""

    @abstractmethod
    def may_wait(self, unit: UnitProfile) -> bool:
        """Whether the unit may reduce its gradients in the last micro-batch only."""

    @abstractmethod
    def num_all_gathers(
        self, mode: ShardingMode, unit: UnitProfile | None = None, *, num_micro_batches: int = 1
    ) -> int:
        """All-gathers per optimizer step of a unit in this mode.

        Args:
            mode: of the unit.
            unit: None: one that forward calls once.
            num_micro_batches: of an optimizer step.
        """

    def num_reduce_scatters(self, mode: ShardingMode, *, num_micro_batches: int = 1) -> int:
        """Reduce-scatters per optimizer step of a unit in this mode."""
        return 1 if mode.sync == "last" else num_micro_batches

    @abstractmethod
    def all_gather_bytes(self, unit: UnitProfile, world_size: int) -> float:
        """Bytes of the whole tensor that an all-gather of the unit makes."""

    @abstractmethod
    def reduce_scatter_bytes(self, unit: UnitProfile, world_size: int) -> float:
        """Bytes of the whole tensor that its reduce-scatter takes; 0 where it has no gradients."""

    @abstractmethod
    def layout(
        self, units: Sequence[UnitProfile], optimizer: OptimizerProfile, world_size: int, *, rank: int | None = None
    ) -> Layout:
        """Bytes of units on one rank.

        Args:
            units: of the model.
            optimizer: its step.
            world_size: N.
            rank: whose bytes; None: for state and temporaries together, those of the rank that has most.
        """

    @abstractmethod
    def live_parts(
        self, step: Step, observer: Observer, *, rank: int | None = None, is_bound: bool = False
    ) -> LiveParts:
        """What reads events as bytes.

        Args:
            step: whose events are read.
            observer: told of every moment.
            rank: whose bytes; None: those of the rank that holds most.
            is_bound: whether what follows is to hold whatever the modes of other units.
        """

    @abstractmethod
    def host(self, course: Course) -> Host:
        """What goes through a step."""

    def micro_batches(
        self,
        units: Sequence[UnitProfile],
        is_kept: Sequence[bool],
        accumulates: Sequence[bool],
        *,
        num_micro_batches: int = 1,
        num_segments: int,
        rerun: Mapping[str, Rerun],
        merges_calls: bool = False,
    ) -> list[list[Event]]:
        """Events of forward, loss and backward in the first, a steady and the last micro-batch, as many as there are.

        Arguments are those of `Course`.
        """
        if AUTO in {self.backward_prefetch, self.forward_prefetch}:
            raise ValueError("An engine with a prefetch that is 'auto' runs nothing: ask for its alternatives.")
        host = self.host(
            Course(
                units=units,
                is_kept=is_kept,
                accumulates=accumulates,
                num_segments=num_segments,
                rerun=rerun,
                merges_calls=merges_calls,
            )
        )
        found = []
        num_simulated = min(MOST_SIMULATED, num_micro_batches)
        for index in range(num_simulated):
            host.begin(is_first=index == 0, is_last=index == num_simulated - 1)
            host.forward()
            host.backward()
            found.append(host.events)
        return found

    def events_of(self, step: Step, modes: Sequence[ShardingMode]) -> list[list[Event]]:
        """Events of the micro-batches that are gone through, with these modes, one per unit."""
        world_size = step.cluster.world_size
        return self.micro_batches(
            step.units,
            [self.keeps(mode, world_size) for mode in modes],
            [mode.sync == "last" and world_size > 1 for mode in modes],
            num_micro_batches=step.workload.num_micro_batches,
            num_segments=len(step.profile.segments),
            rerun=step.profile.rerun,
        )
