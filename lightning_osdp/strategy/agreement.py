"""Ranks that succeed or fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lightning_osdp.errors import OSDPError

T = TypeVar("T")


def on_all_ranks(work: Callable[[], T]) -> T:
    """Runs ``work`` on every rank; if it raises on one, every rank raises.

    Raises:
        OSDPError: on ranks where it succeeded, with the text of the first rank where it did not.
    """
    result, failure = _attempt(work)
    texts = from_all_ranks(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    failed = next((rank for rank, text in enumerate(texts) if text is not None), None)
    if failed is not None:
        raise OSDPError(f"Rank {failed} failed, so every rank stops: {texts[failed]}")
    assert not isinstance(result, _Nothing)
    return result


def on_rank_zero(work: Callable[[], T]) -> T:
    """Runs ``work`` on rank 0 alone and gives its result, or the error that it raised, to every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    outcome: list[object] = [None]
    if dist.get_rank() == 0:
        result, failure = _attempt(work)
        outcome = [result if failure is None else _Failed(failure)]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], _Failed):
        raise outcome[0].error
    return outcome[0]  # type: ignore[return-value]


def from_all_ranks(value: T) -> list[T]:
    """What each rank gives, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class _Nothing:
    pass


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


def _attempt(work: Callable[[], T]) -> tuple[T | _Nothing, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return _Nothing(), error
