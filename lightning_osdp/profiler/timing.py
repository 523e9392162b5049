"""Seconds of each segment of a step, on the device that trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_osdp.core.progress import Progress, silent
from lightning_osdp.profiler.calls import Calls
from lightning_osdp.profiler.loss import check_finite
from lightning_osdp.profiler.memory import is_out_of_memory
from lightning_osdp.profiler.segments import Position, followed
from lightning_osdp.profiler.together import Together, alone

_REPEATS = 5
_REPEAT_BUDGET_S = 3.0
"""What takes longer than this all together is not repeated further."""


@dataclass(frozen=True)
class Seconds:
    """Of each segment, the loss last."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Of the whole micro-batch."""
        return sum(self.forward_s) + sum(self.backward_s)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_step(
    module: nn.Module,
    calls: Calls,
    device: torch.device,
    loss_of: Callable[[], Tensor],
    *,
    stage: str = "timing",
    together: Together = alone,
    progress: Progress = silent,
) -> Seconds | None:
    """Segments of the fastest of a few forwards and backwards, after one to warm up.

    Ranks run at the same time, as they do when they train: those that share cores, a bus or a power limit slow each
    other down. The total is that of the fastest run on the slowest rank; each segment has the share of its own fastest
    run in the sum of those.

    Args:
        module: the model, on the device.
        calls: what its forward does.
        device: waited for.
        loss_of: runs forward and returns the loss.
        stage: of the progress.
        together: how ranks run at the same time.
        progress: called with each run as it begins.

    Returns:
        None on every rank where the device of one has too little memory.

    Raises:
        ProfileError: the loss is not finite.
    """
    modules = dict(module.named_modules())
    start = time.perf_counter()
    runs: list[Seconds] = []
    slowest_s: list[float] = []

    def run() -> tuple[float, float] | None:
        try:
            runs.append(_timed(modules, calls, device, loss_of))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        return runs[-1].total_s, time.perf_counter() - start

    for repeat in range(_REPEATS + 1):
        progress(stage, f"run {repeat + 1} of {_REPEATS + 1}")
        module.zero_grad()  # gradients that are there already would be added to
        of_ranks = together(run, stage=stage)
        taken = [each for each in of_ranks if each is not None]
        if len(taken) < len(of_ranks):
            return None
        slowest_s.append(max(total_s for total_s, _ in taken))
        if len(runs) > 1 and max(since_s for _, since_s in taken) > _REPEAT_BUDGET_S:
            break
    return _fastest(runs[1:], total_s=min(slowest_s[1:]))


def _timed(
    modules: Mapping[str, nn.Module], calls: Calls, device: torch.device, loss_of: Callable[[], Tensor]
) -> Seconds:
    stopwatch = _Stopwatch(device)
    position = Position(calls, lambda: stopwatch.mark(position))
    with followed(modules, position, calls):
        stopwatch.start()
        loss = loss_of()
        position.start_backward()
        loss.backward()
        position.end()
    check_finite(loss)
    return stopwatch.seconds(position.num_segments)


def _fastest(runs: Sequence[Seconds], *, total_s: float) -> Seconds:
    forward_s = [min(values) for values in zip(*(run.forward_s for run in runs), strict=True)]
    backward_s = [min(values) for values in zip(*(run.backward_s for run in runs), strict=True)]
    scale = total_s / (sum(forward_s) + sum(backward_s))
    return Seconds(tuple(s * scale for s in forward_s), tuple(s * scale for s in backward_s))


class _Stopwatch:
    """When the device is through with each segment: the host's clock on CPU, events in the stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[bool, int, float | torch.cuda.Event]] = []
        self._start: float | torch.cuda.Event = 0.0

    def start(self) -> None:
        synchronize(self._device)
        self._start = self._now()

    def mark(self, position: Position) -> None:
        self._marks.append((position.in_backward, position.now, self._now()))

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, num_segments: int) -> Seconds:
        synchronize(self._device)
        forward_s, backward_s = [0.0] * num_segments, [0.0] * num_segments
        before = self._start
        for in_backward, segment, mark in self._marks:
            (backward_s if in_backward else forward_s)[segment] += _between_s(before, mark)
            before = mark
        return Seconds(tuple(forward_s), tuple(backward_s))


def _between_s(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(end, float)
    return end - start
