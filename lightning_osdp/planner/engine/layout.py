"""Layout of the units of ``fully_shard`` on the ranks: bytes to the element, paddings included.

Each parameter is cut along its first dimension into chunks of

    c = ceil(rows / N)

rows, and a shard has the storage of c rows on every rank, also on those that own fewer or none. An all-gather and a
reduce-scatter carry N c rows of each parameter, in one collective; gradients as backward makes them have no paddings,
and neither have the tensors that the optimizer sees. Rank 0 owns most.

References:
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py (``_init_sharded_param``), _fsdp_collectives.py
    (``foreach_all_gather``, ``foreach_reduce``). [Seen in torch 2.13.]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from lightning_osdp.core.profile import OptimizerProfile, ParameterProfile
from lightning_osdp.core.units import UnitProfile

_MOST_KNOWN = 2**14
"""Units whose bytes are remembered: a search asks for the same ones in many settings."""


class ParameterBytes(NamedTuple):
    """Bytes of one parameter on one rank."""

    gathered: float
    """P of it."""
    shared: float
    """Part of its shard that is a view of what is gathered where its unit is resident: none if that is cast."""


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Bytes of one unit on one rank."""

    shard: float
    """Parameters at rest."""
    host_shard: float
    """Parameters at rest in memory of the host: all of them or none."""
    gathered: float
    """P: what lives from a gather to the unit's being freed."""
    parameters: tuple[ParameterBytes, ...]
    """Bytes of each parameter; of the whole unit where parameters are not profiled."""
    cast_shard: float
    """The shard in the dtype of computing, which lives while the unit is gathered under mixed precision."""
    sent_shard: float
    """Bytes of what an all-gather sends that are no shard: the shard is cast, or copied from the host."""
    gradients: float
    """Unsharded gradients as backward makes them, one by one."""
    flat_gradient: float
    """S: all of them as one tensor, paddings included: what a reduce-scatter sends."""
    whole_gradient: float
    """Bytes left of the gradients from one micro-batch to the next where they are not reduced."""
    scattered: float
    """Output of a reduce-scatter, in the dtype of computing."""
    reduced: float
    """s: the shard of the reduced gradient, in the dtype at rest."""
    kept_gradient: float
    """Part of it that stays on the device: none where the shard is on the host, to which it is copied."""
    buffer: float = 0.0
    """Output of an all-gather, from which the unsharded unit is copied; on one rank a copy from the host, or none."""
    last_gradient: float = 0.0
    """Gradient that lives while the others are reduced."""
    last_whole_gradient: float = 0.0
    """Part of the last gradient in `whole_gradient`."""
    casting: float = 0.0
    """Most bytes beside the gradients while what is left of them is cast to the dtype of reducing, one by one; 0 where
    nothing is cast."""

    @property
    def shared(self) -> float:
        """Part of the shard that takes no memory of its own where the unit is resident."""
        return sum(parameter.shared for parameter in self.parameters)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Bytes of all units on one rank."""

    units: tuple[UnitBytes, ...]
    optimizer_state: float
    optimizer_temporaries: float
    """Most bytes that the optimizer step allocates and frees."""
    host: float = 0.0
    """Memory of the host: states there, and copies of shards and of their gradients, which may be pinned; without
    temporaries of updates. Shards there with their gradients, which may be pinned, too."""
    host_copies: float = 0.0
    """Copies of these states, and of shards and gradients there, on which updates compute that begin in backward."""

    @property
    def shards(self) -> float:
        """Parameters at rest."""
        return sum(unit.shard for unit in self.units)


@lru_cache(maxsize=256)
def layout(
    units: tuple[UnitProfile, ...],
    optimizer: OptimizerProfile,
    shards: tuple[int, ...],
    rank: int,
    on_host: tuple[bool, ...],
    *,
    shards_on_host: tuple[bool, ...],
    pins: bool,
) -> Layout:
    """Bytes of units on one rank; arguments as of `FSDP2.layout`."""
    own = [
        (unit, number, [owned_elements(parameter, number, rank % number) for parameter in unit.parameters])
        for unit, number in zip(units, shards, strict=True)
    ]
    here, there = ([each for each, is_host in zip(own, on_host, strict=True) if is_host is of] for of in (False, True))
    state, temporaries = optimizer_bytes(here, optimizer)
    host_states, _ = optimizer_bytes(there, optimizer)
    kept = [each for each, is_host in zip(own, shards_on_host, strict=True) if is_host]
    gradients = {False: 0.0, True: 0.0}  # by whether the shard is there, too
    for each, is_host, has_shard in zip(own, on_host, shards_on_host, strict=True):
        gradients[has_shard] += _owned_bytes(*each, pins=pins) if is_host else 0.0
    return Layout(
        units=tuple(
            _with_host_shard(unit, number) if is_host else _unit_bytes(unit, number)
            for unit, number, is_host in zip(units, shards, shards_on_host, strict=True)
        ),
        optimizer_state=state,
        optimizer_temporaries=temporaries,
        host=host_states
        + 2 * gradients[False]
        + gradients[True]
        + sum(_shard_bytes(unit, number, pins=pins) for unit, number, _ in kept),
        host_copies=host_states + 2 * gradients[True],
    )


def chunk_elements(parameter: ParameterProfile, world_size: int) -> int:
    """Elements of one chunk of a parameter, which a shard has storage for."""
    rows = parameter.num_elements if parameter.num_rows is None else parameter.num_rows
    return math.ceil(rows / world_size) * (parameter.num_elements // rows) if rows else 0


def owned_elements(parameter: ParameterProfile, world_size: int, rank: int) -> int:
    """Elements of a parameter that a rank owns."""
    chunk = chunk_elements(parameter, world_size)
    return max(0, min(chunk, parameter.num_elements - rank * chunk))


@lru_cache(maxsize=_MOST_KNOWN)
def gathered_bytes(unit: UnitProfile, world_size: int) -> float:
    """w: of all parameters, in the dtype of computing, paddings included."""
    if not unit.parameters:
        return float(unit.gathered_bytes)
    return float(
        world_size * sum(chunk_elements(each, world_size) * each.gathered_itemsize for each in unit.parameters)
    )


@lru_cache(maxsize=_MOST_KNOWN)
def sent_bytes(unit: UnitProfile, world_size: int) -> float:
    """r: of the gradients of all trainable parameters, in the dtype of reducing, paddings included."""
    if not unit.parameters:
        return float(unit.gradient_bytes)
    trained = _trained(unit)
    return float(world_size * sum(chunk_elements(each, world_size) * each.sent_itemsize for each in trained))


def retaining_bytes(unit: UnitProfile, world_size: int, node_size: int) -> float:
    """Most bytes beside a gathered unit while forward leaves a shard of it in each node.

    It copies a parameter's part and frees the parameter, one after the other.
    """
    if not unit.parameters:
        return unit.gathered_bytes / node_size
    most = beside = 0.0
    for parameter in unit.parameters:
        whole = world_size * chunk_elements(parameter, world_size) * parameter.gathered_itemsize
        beside += whole / node_size
        most = max(most, beside)
        beside -= whole
    return most


def optimizer_bytes(
    held: Sequence[tuple[UnitProfile, int, Sequence[int]]], optimizer: OptimizerProfile
) -> tuple[float, float]:
    """State of a rank, and temporaries of its step.

    Args:
        held: units, the ranks that each is sharded over, and elements of each of its parameters that the rank holds.
        optimizer: temporaries of its step.
    """
    state = 0.0
    updated: list[tuple[int, int, float]] = []
    for unit, number, held_elements in held:
        if not unit.parameters:
            state += unit.optimizer_bytes / number
            updated.append((0, len(updated), unit.trainable_bytes / number))
            continue
        for parameter, elements in zip(unit.parameters, held_elements, strict=True):
            if parameter.is_trainable and elements:
                state += parameter.state_bytes_per_element * elements
                updated.append((parameter.group, parameter.place, float(elements * parameter.itemsize)))
    groups: dict[int, list[float]] = {}
    for group, _, num_bytes in sorted(updated):
        groups.setdefault(group, []).append(num_bytes)
    return state, max((_temporaries(optimizer, sizes) for sizes in groups.values()), default=0.0)


def _owned_bytes(unit: UnitProfile, world_size: int, held_elements: Sequence[int], *, pins: bool) -> float:
    """Trained part of a rank's shard, without paddings; or what copies of its parameters take that are pinned."""
    if not unit.parameters:
        sizes = [unit.trainable_bytes / world_size]
    else:
        held = zip(unit.parameters, held_elements, strict=True)
        sizes = [float(elements * parameter.itemsize) for parameter, elements in held if parameter.is_trainable]
    return float(sum(map(pinned_bytes, sizes) if pins else sizes))


def _shard_bytes(unit: UnitProfile, world_size: int, *, pins: bool) -> float:
    """Bytes of a rank's shard with its paddings, also in the dtype that is gathered, or of tensors that are pinned."""
    sizes = [
        float(chunk_elements(each, world_size) * itemsize)
        for each in unit.parameters
        for itemsize in {each.itemsize, each.gathered_itemsize}
    ]
    if not unit.parameters:
        sizes = [num_bytes / world_size for num_bytes in {unit.parameter_bytes, unit.gathered_bytes}]
    return float(sum(map(pinned_bytes, sizes) if pins else sizes))


def pinned_bytes(num_bytes: float) -> int:
    """Host memory that a pinned tensor of so many bytes takes: the next power of two.

    References:
        aten/src/ATen/core/CachingHostAllocator.h (``allocate``).
    """
    return 1 << (math.ceil(num_bytes) - 1).bit_length() if num_bytes > 0 else 0


def _temporaries(optimizer: OptimizerProfile, sizes: Sequence[float]) -> float:
    """Most bytes alive in the step over one parameter group."""
    if optimizer.is_foreach:
        return optimizer.foreach_temporaries * sum(sizes)
    turns = pairwise([0.0, *sizes])
    return max((x * before + y * own for before, own in turns for x, y in optimizer.temporaries), default=0.0)


def _trained(unit: UnitProfile) -> Sequence[ParameterProfile]:
    return [parameter for parameter in unit.parameters if parameter.is_trainable]


@lru_cache(maxsize=_MOST_KNOWN)
def _unit_bytes(unit: UnitProfile, world_size: int) -> UnitBytes:
    gathered, sent, trained = gathered_bytes(unit, world_size), sent_bytes(unit, world_size), _trained(unit)
    if unit.parameters:
        shard = float(sum(chunk_elements(each, world_size) * each.itemsize for each in unit.parameters))
        reduced = float(sum(chunk_elements(each, world_size) * each.itemsize for each in trained))
        cast = [each for each in unit.parameters if each.itemsize != each.gathered_itemsize]
        casts = [float(chunk_elements(each, world_size) * each.gathered_itemsize) for each in cast]
        computed = [each.num_elements * each.gathered_itemsize for each in trained]
        whole = [each.num_elements * each.sent_itemsize for each in trained]
        parameters = tuple(_parameter_bytes(each, world_size) for each in unit.parameters)
    else:
        shard, reduced = unit.parameter_bytes / world_size, unit.trainable_bytes / world_size
        casts = [gathered / world_size] if unit.gathered_bytes != unit.parameter_bytes else []
        computed = whole = [operator.gradient_bytes for operator in unit.operators]
        parameters = (ParameterBytes(gathered, 0.0 if casts else shard),)
    is_sharded = world_size > 1
    cast_shard = sum(casts) if is_sharded else 0.0  # one rank casts shards in copying them
    return UnitBytes(
        shard=shard,
        host_shard=0.0,
        gathered=gathered,
        parameters=parameters,
        cast_shard=cast_shard,
        sent_shard=cast_shard,
        gradients=float(unit.gradient_bytes),
        flat_gradient=sent,
        whole_gradient=float(sum(whole)),
        scattered=sent / world_size,
        reduced=reduced if sent else 0.0,
        kept_gradient=reduced if sent else 0.0,
        buffer=gathered if is_sharded else 0.0,
        last_gradient=float(computed[-1]) if is_sharded and computed else 0.0,
        last_whole_gradient=float(whole[-1]) if is_sharded and whole else 0.0,
        casting=float(_casting(computed, whole)),
    )


@lru_cache(maxsize=_MOST_KNOWN)
def _with_host_shard(unit: UnitProfile, world_size: int) -> UnitBytes:
    """Bytes of a unit whose shard is on the host, of which each all-gather takes a copy in the dtype of computing.

    Copies of parameters live until all of them are sent. One rank copies ahead.
    """
    found = _unit_bytes(unit, world_size)
    there = replace(found, shard=0.0, host_shard=found.shard, kept_gradient=0.0)
    if world_size == 1:
        return replace(there, buffer=found.gathered, sent_shard=0.0)
    return replace(there, sent_shard=found.gathered / world_size)


def _parameter_bytes(parameter: ParameterProfile, world_size: int) -> ParameterBytes:
    shard = float(chunk_elements(parameter, world_size) * parameter.gathered_itemsize)
    return ParameterBytes(world_size * shard, shard if parameter.itemsize == parameter.gathered_itemsize else 0.0)


def _casting(computed: Sequence[int], cast: Sequence[int]) -> int:
    """Most bytes beside gradients while they are cast one after the other; each lives until the next one's turn."""
    if computed == cast:
        return 0
    beside, most = 0, 0
    for before, after in zip(computed, cast, strict=True):
        beside += after
        most = max(most, beside)
        beside -= before
    return most
