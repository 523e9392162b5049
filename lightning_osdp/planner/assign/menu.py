"""Menus: what a unit may do, without what another way beats in everything that a search weighs.

A search weighs seconds, bytes that a unit holds from its forward to its backward, and bytes that it holds all the time.
Where nothing overlaps seconds are one number. Where something does, seconds of computing and of each link's collectives
are numbers of their own: what takes fewer of one and more of another may be faster or slower in a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_osdp.core.axes import Subject, treatments_of
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.assign.additive import Modes
from lightning_osdp.planner.engine import FSDP2

Price = tuple[float, ...]
"""Seconds and bytes of one way to treat a unit: each counts by itself, and less is better."""


def subject_of(unit: UnitProfile, step: Step, engine: FSDP2) -> Subject:
    """Properties of a unit that rules of axes ask for."""
    waits = step.workload.num_micro_batches > 1 and step.cluster.world_size > 1
    return Subject(
        has_host=step.profile.optimizer.host_s_per_element is not None,
        has_nodes=step.cluster.has_nodes,
        is_reached=unit.last >= unit.trained_from,
        is_trained=unit.gradient_bytes > 0,
        may_leave=unit.parameter_bytes > 0 and unit.trainable_bytes in {0, unit.parameter_bytes},
        may_leave_alone=not unit.gradient_bytes,
        may_exchange=unit.exchange is not None and unit.block is None and _may_exchange(unit.exchange, step),
        may_replicate=_may_replicate(unit) and step.cluster.world_size > 1,
        may_stay=not unit.gradient_bytes and not unit.is_root and step.cluster.world_size > 1,
        may_wait=waits and engine.may_wait(unit),
    )


def _may_exchange(exchange: Exchange, step: Step) -> bool:
    """Tells if the ranks can each have a part of an exchange's operators."""
    return step.cluster.world_size > 1 and exchange.divides_over(step.cluster.world_size)


def _may_replicate(unit: UnitProfile) -> bool:
    """Tells if a unit's weights can be views of its shard where that is whole: none is a scalar, or cast."""
    has_rows = all(each.num_elements > 1 for each in unit.parameters)
    is_cast = unit.gathered_bytes != unit.parameter_bytes or any(
        each.itemsize != each.gathered_itemsize for each in unit.parameters
    )
    return unit.gradient_bytes > 0 and not unit.is_root and has_rows and not is_cast


def applicable(unit: UnitProfile, step: Step, engine: FSDP2) -> Modes:
    """All treatments of a unit that make a difference, offered or not; none of the root, and of one rank."""
    if unit.is_root or step.cluster.world_size == 1:
        return ()
    return treatments_of(subject_of(unit, step, engine))


def unbeaten(prices: Sequence[Price]) -> tuple[int, ...]:
    """Places of the prices that no other one beats: is at most in every number. The first of equal ones is left.

    Example:
        >>> unbeaten([(3.0, 0.0), (1.0, 8.0), (2.0, 8.0), (3.0, 0.0)])
        (0, 1)
    """

    def beats(place: int, other: int) -> bool:
        ours, theirs = prices[place], prices[other]
        if ours == theirs:
            return place < other
        return all(mine <= its for mine, its in zip(ours, theirs, strict=True))

    everyone = range(len(prices))
    return tuple(own for own in everyone if not any(beats(other, own) for other in everyone))
