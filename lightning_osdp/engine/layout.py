"""Bytes of units on one rank, as every engine tells them, and what the optimizer step takes of its pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.core.units import UnitProfile


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """One unit on one rank."""

    shard: float
    """Parameters at rest."""
    gathered: float
    """P: what lives from a gather to the unit's being freed; 0 where computing uses the parameters at rest."""
    cast_shard: float
    """The shard in the dtype of computing, which lives while the unit is gathered under mixed precision."""
    gradients: float
    """Unsharded gradients as backward makes them, one by one."""
    flat_gradient: float
    """S: all of them as one tensor, paddings included: what a reduce-scatter sends."""
    whole_gradient: float
    """What is left of them from one micro-batch to the next where they are not reduced."""
    scattered: float
    """What a reduce-scatter returns, in the dtype of computing."""
    reduced: float
    """s: the shard of the reduced gradient, in the dtype at rest."""
    buffer: float = 0.0
    """What an all-gather fills, where that is not the gathered unit itself but copied into it."""
    last_gradient: float = 0.0
    """Gradient that lives while the others are reduced."""
    last_whole_gradient: float = 0.0
    """The same of what is left from one micro-batch to the next."""
    casting: float = 0.0
    """Most bytes beside the gradients while what is left of them is cast to the dtype of reducing, one by one; 0 where
    nothing is cast."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All units on the rank that holds most."""

    units: tuple[UnitBytes, ...]
    optimizer_state: float
    optimizer_temporaries: float
    """Most bytes that the optimizer step allocates and frees."""

    @property
    def shards(self) -> float:
        """Parameters at rest."""
        return sum(unit.shard for unit in self.units)


def optimizer_bytes(
    units: Sequence[UnitProfile],
    held: Callable[[int], Sequence[int]],
    optimizer: OptimizerProfile,
    world_size: int,
) -> tuple[float, float]:
    """State of one rank, and temporaries of its step.

    Args:
        units: of the model.
        held: by unit, the elements of each of its parameters that the rank holds.
        optimizer: its step.
        world_size: N.
    """
    state = 0.0
    updated: list[tuple[int, int, float]] = []
    for index, unit in enumerate(units):
        if not unit.parameters:
            state += unit.optimizer_bytes / world_size
            updated.append((0, len(updated), unit.trainable_bytes / world_size))
            continue
        for parameter, elements in zip(unit.parameters, held(index), strict=True):
            if parameter.is_trainable and elements:
                state += parameter.state_bytes_per_element * elements
                updated.append((parameter.group, parameter.place, float(elements * parameter.itemsize)))
    groups: dict[int, list[float]] = {}
    for group, _, num_bytes in sorted(updated):
        groups.setdefault(group, []).append(num_bytes)
    return state, max((_temporaries(optimizer, sizes) for sizes in groups.values()), default=0.0)


def _temporaries(optimizer: OptimizerProfile, sizes: Sequence[float]) -> float:
    """Most bytes alive in the step over one parameter group."""
    if optimizer.is_foreach:
        return optimizer.foreach_temporaries * sum(sizes)
    turns = pairwise([0.0, *sizes])
    return max((x * before + y * own for before, own in turns for x, y in optimizer.temporaries), default=0.0)
