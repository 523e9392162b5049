"""All ranks at once: they succeed or fail together, tell each other values, and find which of them share a node."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_osdp.apply import new_host_group, reaches_hosts
from lightning_osdp.errors import ConfigurationError, OSDPError, RanksApartError

T = TypeVar("T")

_FIRST_RANK = "_osdp_first_rank"
"""Attribute of errors that every rank raises: the first rank that failed."""


def first_rank(error: BaseException) -> int | None:
    """The first rank that failed, of an error that every rank raises; None of any other."""
    return getattr(error, _FIRST_RANK, None)


def on_all_ranks(work: Callable[[], T]) -> T:
    """Runs ``work`` on every rank; if it raises on one, every rank raises, as in `in_step`."""
    results: list[T] = []
    in_step(lambda: results.append(work()), stage="")
    return results[0]


def in_step(work: Callable[[], T], /, *, stage: str) -> Sequence[T]:
    """Runs ``work`` on every rank, and gives each what it returned on all; if it raises on one, every rank raises.

    ``work`` may itself do something in step: an error that all ranks have is not told again. ``stage`` says what it is
    for, the same on every rank. Results are by rank.

    Raises:
        OSDPError: on ranks where it succeeded, with the text of the first rank where it did not.
        RanksApartError: the same, and ranks have come to different stages: an error that no rank may pass over.
    """
    result, failure = _attempt(work)
    if failure is not None and first_rank(failure) is not None:
        raise failure
    said = all_gather_values((stage, None if failure is None else f"{type(failure).__name__}: {failure}", result))
    failed = next((rank for rank, (_, text, _) in enumerate(said) if text is not None), None)
    are_apart = len({stage for stage, _, _ in said}) > 1
    if failure is None and failed is not None:
        kind = RanksApartError if are_apart else OSDPError
        failure = kind(f"Rank {failed} failed, so every rank stops: {said[failed][1]}")
    if failure is None and are_apart:
        stages = ", ".join(f"rank {rank}: {stage or 'done'}" for rank, (stage, _, _) in enumerate(said))
        failure = RanksApartError(
            f"Expected every rank to do the same while it profiles, but they do not: {stages}. Let the module and its"
            " loaders be the same on every rank, or plan once and pass plan=."
        )
    _raise_everywhere(failure, failed or 0)
    return [cast("T", each) for _, _, each in said]


def on_rank_zero(work: Callable[[], T]) -> T:
    """Runs ``work`` on rank 0 alone and gives its result, or the error that it raised, to every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    outcome: list[Any] = [None]
    own: Exception | None = None
    if dist.get_rank() == 0:
        result, own = _attempt(work)
        outcome = [(result, None if own is None else _sendable(own))]
    dist.broadcast_object_list(outcome, src=0, group=host_group())
    result, sent = outcome[0]
    _raise_everywhere(sent if own is None else own, 0)
    return cast("T", result)


def all_gather_values(value: T) -> list[T]:
    """What each rank gives, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


def broadcast_number(number: int) -> int:
    """Rank 0's, on every rank; no device is waited for, so that this can be asked in every batch."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    said = torch.tensor([number], device="cpu")
    dist.broadcast(said, src=0, group=host_group())
    return int(said.item())


def broadcast_value(value: T, rank: int) -> T:
    """One rank's value, on every rank; values of the others are ignored."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=rank, group=host_group())
    return values[0]


def ranks_of_node(strategy: FSDPStrategy, wanted: int | None) -> int | None:
    """How many ranks each node has, all of which follow each other; None where all are on one. Call it on all ranks.

    Where nodes have different numbers of ranks, or ranks go round them in turn, there are no nodes to plan for: that is
    said, and all ranks count as one node. Ranks of this node are as many as ``LOCAL_WORLD_SIZE`` says, else as the
    Trainer's ``devices``, unless the user has ``wanted`` another number; a `ConfigurationError` is raised if the ranks
    cannot be divided into nodes of so many.
    """
    world_size = strategy.world_size
    if wanted is not None:
        if world_size % wanted:
            raise ConfigurationError(
                f"Expected a node_size that divides the {world_size} ranks, got {wanted}. Leave it out, and it is what"
                " the ranks were started with."
            )
        return wanted if wanted < world_size else None
    assert strategy.cluster_environment is not None
    size = int(os.environ.get("LOCAL_WORLD_SIZE") or strategy.num_processes)
    if size >= world_size:
        return None
    told = all_gather_values((size, strategy.cluster_environment.local_rank()))
    if any(each != (size, rank % size) for rank, each in enumerate(told)) or world_size % size:
        rank_zero_warn(
            f"OSDP: plans are made as if all ranks were on one node, for nodes do not have equally many ranks that"
            f" follow each other: ranks of the node and place in it, by rank, are {told}. Start ranks node by node, or"
            " pass node_size."
        )
        return None
    return size


def host_group() -> dist.ProcessGroup:
    """All ranks, by way of their hosts: the default group, or one of gloo's beside it where that is NCCL's.

    What ranks tell each other outside of training goes this way: a device that has failed tells nothing, and one that
    computes would be waited for. All ranks must ask for it first at the same point.
    """
    world = dist.group.WORLD
    assert world is not None
    return _host_group(world)


@lru_cache(maxsize=1)
def _host_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    return world if reaches_hosts(world) else new_host_group(world)


def _sendable(error: Exception) -> Exception:
    """The error, or its text where other ranks could not make it from what was sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return OSDPError(f"Rank 0 failed, so every rank stops: {type(error).__name__}: {error}")
    return error


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _raise_everywhere(error: Exception | None, rank: int) -> None:
    """Raises an error that every rank raises, where this rank was the first that failed."""
    if error is not None:
        setattr(error, _FIRST_RANK, rank)
        raise error
