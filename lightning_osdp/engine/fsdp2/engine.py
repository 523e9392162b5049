"""`torch.distributed.fsdp.fully_shard`, as the planner asks it: `FSDP2`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import override

from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine.engine import AUTO, Engine
from lightning_osdp.engine.events import GatherRule
from lightning_osdp.engine.fsdp2.layout import gathered_bytes, layout, sent_bytes
from lightning_osdp.engine.fsdp2.live_parts import FSDP2LiveParts
from lightning_osdp.engine.fsdp2.schedule import FSDP2Host
from lightning_osdp.engine.host import Course
from lightning_osdp.engine.layout import Layout
from lightning_osdp.engine.live_parts import Observer


@dataclass(frozen=True, kw_only=True)
class FSDP2(Engine):
    """Torch's ``fully_shard`` with its settings of prefetching.

    Units are groups of parameters, each sharded along its rows; modules stay as they are.
    """

    asynchronous_unshard: bool = True
    """Whether all-gathers are issued so that computing may go on, and their buffers are gone sooner. They then begin
    where the host has issued them: without `forward_prefetch` nothing is computed beside those of forward."""
    late_forward: tuple[str, ...] = ()
    """Units, by name, that are gathered when forward comes to them, whatever `forward_prefetch` says of the others."""
    late_backward: tuple[str, ...] = ()
    """The same of backward."""

    prefetches: ClassVar[tuple[str, ...]] = ("pre", "none")

    @override
    def alternatives(self, *, overlaps: bool) -> tuple[FSDP2, ...]:
        """With asynchronous unsharding and all units gathered ahead; or with synchronous, if forward is to be chosen.

        Synchronous all-gathers begin by themselves while forward computes, a unit earlier, and hold one more buffer:
        neither is better for all models. To gather ahead explicitly besides makes those no earlier.
        """
        backward = self.backward_prefetch
        if backward == AUTO:
            backward = "pre" if overlaps else "none"
        ahead = replace(self, backward_prefetch=backward, forward_prefetch=self.forward_prefetch is True)
        if self.forward_prefetch != AUTO or not overlaps:
            return (ahead,)
        implicit = replace(ahead, asynchronous_unshard=False)
        return (replace(ahead, forward_prefetch=True), implicit) if self.asynchronous_unshard else (implicit,)

    @override
    def without_prefetch(self, chosen: FSDP2) -> FSDP2:
        return replace(
            chosen,
            backward_prefetch="none" if self.backward_prefetch == AUTO else chosen.backward_prefetch,
            forward_prefetch=chosen.forward_prefetch if self.forward_prefetch != AUTO else False,
        )

    @override
    def gathering_late(self, forward: Sequence[str], backward: Sequence[str]) -> FSDP2:
        return replace(self, late_forward=tuple(forward), late_backward=tuple(backward))

    @property
    @override
    def all_ahead(self) -> FSDP2:
        return replace(self, late_forward=(), late_backward=())

    @property
    @override
    def gathers_wait_for(self) -> GatherRule:
        """Asynchronous ones copy what they send in the stream that computes, others in a stream of their own.

        That one waits until units are copied out: in forward until the one before is, elsewhere until the unit itself
        is. [Read: ``get_all_gather_streams`` and ``wait_for_unshard`` in _fsdp_param_group.py.]
        """
        return "computing" if self.asynchronous_unshard else "copies"

    @property
    @override
    def most_lingering(self) -> int:
        """That of the unit before, and that of the next one."""
        return (not self.asynchronous_unshard) + (self.forward_prefetch is True)

    @override
    def keeps(self, mode: ShardingMode, world_size: int) -> bool:
        return mode.resident  # on one rank it copies, too

    @override
    def may_wait(self, unit: UnitProfile) -> bool:
        """Not if forward calls it more than once: what the micro-batches before have left is reduced by itself then."""
        return len(unit.calls) == 1

    @override
    def num_all_gathers(
        self, mode: ShardingMode, unit: UnitProfile | None = None, *, num_micro_batches: int = 1
    ) -> int:
        """One at each call in forward, and one for each that backward comes to: less those that find the unit there.

        A unit that is kept is there at all calls in forward, and at the first that backward comes to.
        """
        num_calls = 1 if unit is None else len(unit.calls)
        num_reached = 1 if unit is None else sum(last >= unit.trained_from for _, last in unit.calls)
        if not mode.resident:
            return num_micro_batches * (num_calls + num_reached)
        return (1 if mode.sync == "last" else num_micro_batches) * max(1, num_reached)

    @override
    def all_gather_bytes(self, unit: UnitProfile, world_size: int) -> float:
        return gathered_bytes(unit, world_size)

    @override
    def reduce_scatter_bytes(self, unit: UnitProfile, world_size: int) -> float:
        """Frozen parameters are not reduced."""
        return sent_bytes(unit, world_size)

    @override
    def layout(
        self, units: Sequence[UnitProfile], optimizer: OptimizerProfile, world_size: int, *, rank: int | None = None
    ) -> Layout:
        return layout(tuple(units), optimizer, world_size, rank or 0)

    @override
    def live_parts(
        self, step: Step, observer: Observer, *, rank: int | None = None, is_bound: bool = False
    ) -> FSDP2LiveParts:
        found = self.layout(step.units, step.profile.optimizer, step.cluster.world_size, rank=rank)
        return FSDP2LiveParts(
            step, observer, layout=found, asynchronous_unshard=self.asynchronous_unshard, is_bound=is_bound
        )

    @override
    def host(self, course: Course) -> FSDP2Host:
        return FSDP2Host(
            course,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=self.forward_prefetch is True,
            late_forward=self.late_forward,
            late_backward=self.late_backward,
        )
