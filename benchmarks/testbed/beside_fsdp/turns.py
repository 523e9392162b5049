"""Trainers of one process that take optimizer steps in turns: what slows the machine for a while slows all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from typing_extensions import override

from benchmarks.testbed.namespaces import sent_bytes


class TakenStep(NamedTuple):
    """One optimizer step, on one rank."""

    seconds: float
    sent_bytes: int
    """Bytes that this rank's host has sent to others; 0 where ranks are not on hosts of their own."""
    cpu_s: float
    """CPU seconds of this rank's process, without those that the kernel takes for packets."""


def fits_in_turns(fits: Mapping[str, Callable[[Turns], None]], *, num_rounds: int) -> dict[str, list[TakenStep]]:
    """Optimizer steps of each fit, taken A B C B C A. Call it on all ranks of the default process group.

    Each fit runs in a thread of its own, of which one runs at a time. Ranks begin every step together. The step
    of the Trainer's loop counts, from its batch to its end: without loading, and without what comes before a fit
    and after it.

    Args:
        fits: by name: trains for 1 + num_rounds optimizer steps with this callback, or calls it without a Trainer.
        num_rounds: timed steps of each, after one to warm up.
    """
    turns = {name: Turns(fit) for name, fit in fits.items()}
    order = list(turns.values())
    for _ in range(2 + num_rounds):  # until its first step, the steps, and what comes after the last one
        for each in order:
            each.take()
        order.append(order.pop(0))  # nobody always comes after the same one
    return {name: each.steps[1:] for name, each in turns.items()}


class Turns(pl.Callback):
    """One fit in a thread that waits before every optimizer step."""

    reads_parameters = False

    def __init__(self, fit: Callable[[Turns], None]) -> None:
        self.steps: list[TakenStep] = []
        self._may_go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._start_s: float | None = None
        self._sent_before, self._cpu_before_s = 0, 0.0
        threading.Thread(target=self._run, args=(fit,), daemon=True).start()

    def take(self) -> None:
        """Lets the fit go on to its next optimizer step, or to its end, and waits for it.

        Raises:
            BaseException: that of the fit.
        """
        self._may_go.release()
        self._waits.acquire()
        if self._error is not None:
            raise self._error

    def _run(self, fit: Callable[[Turns], None]) -> None:
        self._may_go.acquire()
        torch.set_num_threads(1)  # it holds for a thread
        try:
            fit(self)
        except BaseException as error:  # raised where it is waited for
            self._error = error
        self._waits.release()

    def begin(self) -> None:
        """Waits for its turn, and until all ranks are there, before an optimizer step."""
        self._waits.release()
        self._may_go.acquire()
        dist.barrier()
        self._sent_before, self._cpu_before_s = sent_bytes() or 0, time.process_time()
        self._start_s = time.perf_counter()

    def end(self) -> None:
        """Ends an optimizer step."""
        assert self._start_s is not None
        seconds, self._start_s = time.perf_counter() - self._start_s, None
        cpu_s = time.process_time() - self._cpu_before_s
        dist.barrier()  # others of this host may still send
        self.steps.append(TakenStep(seconds, (sent_bytes() or 0) - self._sent_before, cpu_s))

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._start_s is None:
            self.begin()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > len(self.steps):  # or gradients accumulate
            self.end()


def seconds_of(steps: Mapping[str, list[TakenStep]]) -> dict[str, list[float]]:
    """Seconds of every step on this rank, by fit."""
    return {name: [step.seconds for step in taken] for name, taken in steps.items()}


def cpu_seconds(steps: Mapping[str, list[TakenStep]]) -> dict[str, float]:
    """CPU seconds of all ranks in the step that takes fewest, by fit. Call it on all ranks."""
    found = torch.tensor([[step.cpu_s for step in taken] for taken in steps.values()], dtype=torch.float64)
    dist.all_reduce(found)
    return dict(zip(steps, found.min(1).values.tolist(), strict=True))


def slowest_ranks(seconds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Seconds of every step on the rank that is slowest in it, by fit. Call it on all ranks."""
    found = torch.tensor([*seconds.values()], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return dict(zip(seconds, found.tolist(), strict=True))


def fastest_of_slowest(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Seconds of the fastest step on the rank that is slowest in it, by fit. Call it on all ranks."""
    return {name: min(steps) for name, steps in slowest_ranks(seconds).items()}
