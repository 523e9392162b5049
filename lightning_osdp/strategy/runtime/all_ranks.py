"""Work of all ranks at once: success or failure of all, exchange of values, and nodes."""

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
"""Attribute, of errors that every rank raises, for the first rank that failed."""


def first_rank(error: BaseException) -> int | None:
    """Number of the first rank that failed, if every rank raises this error; otherwise None."""
    return getattr(error, _FIRST_RANK, None)


def on_all_ranks(work: Callable[[], T]) -> T:
    """Runs ``work`` on every rank and gives each its own result; if one raises, every rank raises, as in `in_step`."""
    results: list[T] = []
    in_step(lambda: results.append(work()), stage="")  # results are not sent: they may be large
    return results[0]


def in_step(work: Callable[[], T], /, *, stage: str) -> Sequence[T]:
    """Runs ``work`` on every rank and gives each the results of all, by rank; if one raises, every rank raises.

    ``work`` may call `in_step` itself: an error that all ranks have is not sent again. ``stage`` names the work for
    error texts, and must be the same on every rank.

    Raises:
        OSDPError: on ranks where the work succeeded, with the text of the first rank where it failed.
        RanksApartError: ranks have come to different stages, so that none may go on.
    """
    result, failure = _attempt(work)
    if failure is not None and first_rank(failure) is not None:
        raise failure
    sent = all_gather_values((stage, None if failure is None else f"{type(failure).__name__}: {failure}", result))
    failed = next((rank for rank, (_, text, _) in enumerate(sent) if text is not None), None)
    are_apart = len({stage for stage, _, _ in sent}) > 1
    if failure is None and failed is not None:
        kind = RanksApartError if are_apart else OSDPError
        failure = kind(f"Rank {failed} failed, so every rank stops: {sent[failed][1]}")
    if failure is None and are_apart:
        stages = ", ".join(f"rank {rank}: {stage or 'done'}" for rank, (stage, _, _) in enumerate(sent))
        failure = RanksApartError(
            f"Expected every rank to do the same while it profiles, but they do not: {stages}. Let the module and its"
            " loaders be the same on every rank, or plan once and pass plan=."
        )
    _raise_everywhere(failure, failed or 0)
    return [cast("T", result) for _, _, result in sent]


def on_rank_zero(work: Callable[[], T]) -> T:
    """Runs ``work`` on rank 0 alone; every rank returns the result or raises the error."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    failure: Exception | None = None
    outcome: Any = None
    if dist.get_rank() == 0:
        result, failure = _attempt(work)
        outcome = result, None if failure is None else _sendable(failure)
    result, sent = broadcast_value(outcome, 0)
    _raise_everywhere(sent if failure is None else failure, 0)  # rank 0 raises its own error, with the traceback
    return cast("T", result)


def all_gather_values(value: T) -> list[T]:
    """Gathers a value from each rank; gives every rank the list of all, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


def broadcast_number(number: int) -> int:
    """Gives every rank the number of rank 0; fit for every batch, as no device is waited for."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    sent = torch.tensor([number], device="cpu")
    dist.broadcast(sent, src=0, group=host_group())
    return int(sent.item())


def broadcast_value(value: T, rank: int) -> T:
    """Gives every rank the value of one rank; values of other ranks are ignored."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=rank, group=host_group())
    return values[0]


def ranks_of_node(strategy: FSDPStrategy, node_size: int | None) -> int | None:
    """Number of ranks that each node has, all with consecutive ranks; None where all ranks are on one node.

    Call it on all ranks. A ``node_size`` of the user comes first, then ``LOCAL_WORLD_SIZE``, then the Trainer's
    ``devices``. If nodes have different numbers of ranks, or ranks alternate between nodes, a warning says so and all
    ranks count as one node.

    Raises:
        ConfigurationError: ``node_size`` does not divide the number of ranks.
    """
    world_size = strategy.world_size
    if node_size is not None:
        if world_size % node_size:
            raise ConfigurationError(
                f"Expected a node_size that divides the {world_size} ranks, got {node_size}. Leave it out, and it is"
                " what the ranks were started with."
            )
        return node_size if node_size < world_size else None
    assert strategy.cluster_environment is not None
    size = int(os.environ.get("LOCAL_WORLD_SIZE") or strategy.num_processes)
    if size >= world_size:
        return None
    places = all_gather_values((size, strategy.cluster_environment.local_rank()))
    if any(place != (size, rank % size) for rank, place in enumerate(places)) or world_size % size:
        rank_zero_warn(
            f"OSDP: plans are made as if all ranks were on one node, for nodes do not have equally many ranks that"
            f" follow each other: ranks of the node and place in it, by rank, are {places}. Start ranks node by node,"
            " or pass node_size."
        )
        return None
    return size


def host_group() -> dist.ProcessGroup:
    """Process group of all ranks whose collectives run on hosts: the default group, or a gloo group beside NCCL's.

    Ranks exchange values outside of training in this group: a device that has failed sends nothing, and a device that
    computes would be waited for. All ranks must make the first call at the same point, where the group is created.
    """
    world = dist.group.WORLD
    assert world is not None
    return _host_group(world)


@lru_cache(maxsize=1)
def _host_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    return world if reaches_hosts(world) else new_host_group(world)


def _sendable(error: Exception) -> Exception:
    """Gives the error, or an `OSDPError` with its text if the error cannot be pickled and restored."""
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
    """Raises an error, if there is one, that every rank raises; marks it with the first rank that failed."""
    if error is not None:
        setattr(error, _FIRST_RANK, rank)
        raise error
