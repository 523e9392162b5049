"""One process as rank 0 of N: default process groups whose other ranks do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers the backend "fake"
from torch._C._distributed_c10d import HashStore

from benchmarks.testbed.simulated import SimulatedGroup, SimulatedLinks
from lightning_osdp.apply import sharded
from lightning_osdp.apply.internals import in_flight
from lightning_osdp.apply.ranks import agreement


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """The ``fake`` backend of torch: collectives do nothing at once and allocate nothing."""
    with _default_group("fake", world_size):
        yield


@contextmanager
def simulated_group(world_size: int, links: SimulatedLinks | None = None) -> Iterator[SimulatedGroup]:
    """Rank 0 of N over links that are *simulated*: a number measured on them must say so.

    Args:
        world_size: N; this process is rank 0.
        links: how long collectives take and what they allocate; None: no time at all. Where they copy what is reduced,
            units reduce while backward computes, as on gloo.
    """
    is_gloo = links is not None and links.copies_reduced
    with (
        _default_group("simulated", world_size, links),
        mock.patch.object(in_flight, "is_by_gloo", return_value=is_gloo),
    ):
        group = dist.group.WORLD
        assert isinstance(group, SimulatedGroup)
        yield group


def counted_group(world_size: int) -> AbstractContextManager[Any]:
    """Rank 0 of N, whose collectives take no time and allocate what gloo's do: peaks are those of real ranks on CPU."""
    return simulated_group(world_size, SimulatedLinks(copies_reduced=True))


def group_of_one(_: int) -> AbstractContextManager[None]:
    """One real rank on gloo in place of N: for collectives of sparse tensors, which no other group here has."""
    return _default_group("gloo", 1)


def _make(common: Any, links: SimulatedLinks | None) -> SimulatedGroup:
    """Groups that are made beside the default one, such as that by which ranks agree, take no time."""
    return SimulatedGroup(common.group_rank, common.group_size, links or SimulatedLinks())


dist.Backend.register_backend("simulated", _make, extended_api=True, devices=["cpu", "cuda"])


@contextmanager
def _default_group(backend: str, world_size: int, options: Any = None) -> Iterator[None]:
    """Makes a default group of ranks that do not exist.

    Within it OSDP does not try optimizers on shards, which compares values of all ranks, and ranks are taken to have
    equally many rows where activations move.
    """
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=world_size, pg_options=options)
    try:
        with (
            mock.patch.object(sharded, "try_optimizer"),
            mock.patch.object(
                agreement.Agreement, "numbers_of_ranks", lambda _, unit, number, begun=0: [number] * world_size
            ),
        ):
            yield
    finally:
        dist.destroy_process_group()
