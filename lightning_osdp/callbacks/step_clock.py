"""Seconds of training batches on the device that trains, added up to optimizer steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from lightning_osdp.profiler.machine.stopwatch import Mark, between_s, mark, synchronize


class StepClock:
    """Times each optimizer step's batches without ever waiting for the device.

    On CUDA, events mark when the device, not Python, begins and ends a batch; a step is told once it is behind them.
    Elsewhere operations have ended when they return, so Python's clock does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: Mark | None = None
        self._spans: list[tuple[Mark, Mark]] = []
        self._num_samples = 0
        self._ended: deque[tuple[list[tuple[Mark, Mark]], int]] = deque()
        """Spans and samples of each step that is to be told."""

    def start(self) -> None:
        """A batch begins."""
        self._begin = mark(self._device)

    def stop(self, *, num_samples: int) -> None:
        """The batch that was started ends."""
        assert self._begin is not None
        self._spans.append((self._begin, mark(self._device)))
        self._num_samples += num_samples
        self._begin = None

    def end_step(self, *, counts: bool = True) -> None:
        """The batches since the last call were one optimizer step, to be told if it counts."""
        if counts:
            self._ended.append((self._spans, self._num_samples))
        self._spans, self._num_samples = [], 0

    def finished(self, *, wait: bool = False) -> Iterator[tuple[float, int]]:
        """Seconds and samples of each step that was not told yet, oldest first, as far as the device has come.

        With ``wait`` it comes to the end, for which training itself must never wait.
        """
        if wait:
            synchronize(self._device)
        while self._ended and _has_passed(self._ended[0][0][-1][1]):
            spans, num_samples = self._ended.popleft()
            yield sum(between_s(*span) for span in spans), num_samples


def _has_passed(moment: Mark) -> bool:
    # events of one stream pass in order, so the last one speaks for all
    return isinstance(moment, float) or bool(moment.query())
