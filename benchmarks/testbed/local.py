"""Ranks that are processes of this machine; they start once and run many functions."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from functools import cache
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=300)
"""Time in one collective after which a rank gives up: another has failed."""


@cache
def local_ranks(num_ranks: int, backend: str = "gloo") -> LocalRanks:
    """Ranks of this number, on CPU, or with ``nccl`` each on a GPU of its own; always the same."""
    return LocalRanks(num_ranks, backend)


class LocalRanks:
    """Processes with one thread each; they end with this one."""

    def __init__(self, num_ranks: int, backend: str = "gloo") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = get_context("forkserver")
        context.set_forkserver_preload(["lightning_osdp"])  # else every rank imports torch and Lightning for itself
        self._ranks = [
            ProcessPoolExecutor(1, context, initializer=_join, initargs=(rank, num_ranks, port, backend))
            for rank in range(num_ranks)
        ]

    def run(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Calls a function on all ranks.

        Args:
            function: at the top level of a module.
            **kwargs: what can be pickled.

        Returns:
            What it returned on each rank.
        """
        futures = [rank.submit(function, **kwargs) for rank in self._ranks]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()  # raises what a rank has raised
        return [future.result() for future in futures]


def _join(rank: int, num_ranks: int, port: int, backend: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, timeout=_TIMEOUT)
