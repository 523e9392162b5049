"""Seconds of training batches on the device that trains, added up to optimizer steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class _Step:
    spans: list[tuple[_Mark, _Mark]] = field(default_factory=list)
    num_samples: int = 0


class StepClock:
    """Times each optimizer step's batches without ever waiting for the device.

    On CUDA, events mark when the device, not Python, begins and ends a batch; a step is told once it is behind them.
    Elsewhere operations have ended when they return, so Python's clock does.

    Args:
        device: where the training runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: _Mark | None = None
        self._step = _Step()
        self._ended: deque[_Step] = deque()

    def start(self) -> None:
        """A batch begins."""
        self._begin = _mark(self._device)

    def stop(self, *, num_samples: int) -> None:
        """The batch that was started ends."""
        assert self._begin is not None
        self._step.spans.append((self._begin, _mark(self._device)))
        self._step.num_samples += num_samples
        self._begin = None

    def end_step(self, *, counts: bool = True) -> None:
        """The batches since the last call were one optimizer step, to be told if it counts."""
        if counts:
            self._ended.append(self._step)
        self._step = _Step()

    def finished(self, *, wait: bool = False) -> Iterator[tuple[float, int]]:
        """Seconds and samples of each step that was not told yet, oldest first, as far as the device has come.

        Args:
            wait: wait until it has come to the end, which training itself must never do.
        """
        if wait and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        while self._ended and _has_passed(self._ended[0].spans[-1][1]):
            step = self._ended.popleft()
            yield sum(_seconds(*span) for span in step.spans), step.num_samples


_Mark = float | torch.cuda.Event


def _mark(device: torch.device) -> _Mark:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _has_passed(mark: _Mark) -> bool:
    # events of one stream pass in order, so the last one speaks for all
    return isinstance(mark, float) or bool(mark.query())


def _seconds(begin: _Mark, end: _Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float)
        assert isinstance(end, float)
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3
