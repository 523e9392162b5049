"""Seconds of each segment of a step, on the device that trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lightning_osdp.core.text.progress import Progress, silent
from lightning_osdp.profiler.machine.memory import is_out_of_memory
from lightning_osdp.profiler.step.loss import check_finite
from lightning_osdp.profiler.together import Together, alone
from lightning_osdp.profiler.tracing.calls import Calls
from lightning_osdp.profiler.tracing.segments import Position, followed

_REPEATS = 5
_REPEAT_BUDGET_S = 3.0
"""What takes longer than this all together is not repeated further."""
_LEAST_SHARE = 0.1
"""Of what a segment takes with hooks, so much is its own at least."""


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

    Hooks tell segments apart and take time themselves, so each run with them is followed by one without. Ranks run at
    the same time, as they do when they train: those that share cores, a bus or a power limit slow each other down. The
    total is that of the fastest run without hooks on the slowest rank; segments share it as in `shared_out`.

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
    plain_s: list[float] = []
    slowest_s: list[float] = []

    def with_hooks() -> float:
        runs.append(_timed(modules, calls, device, loss_of))
        return runs[-1].total_s

    def without_hooks() -> float:
        plain_s.append(_plain_s(device, loss_of))
        return plain_s[-1]

    def attempt(run: Callable[[], float]) -> tuple[float, float] | None:
        try:
            return run(), time.perf_counter() - start
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    def on_all_ranks(run: Callable[[], float]) -> list[tuple[float, float]] | None:
        module.zero_grad()  # gradients that are there already would be added to
        of_ranks = together(partial(attempt, run), stage=stage)
        taken = [each for each in of_ranks if each is not None]
        return taken if len(taken) == len(of_ranks) else None

    for repeat in range(_REPEATS + 1):
        progress(stage, f"run {repeat + 1} of {_REPEATS + 1}")
        if on_all_ranks(with_hooks) is None or (taken := on_all_ranks(without_hooks)) is None:
            return None
        slowest_s.append(max(total_s for total_s, _ in taken))
        if len(runs) > 1 and max(since_s for _, since_s in taken) > _REPEAT_BUDGET_S:
            break
    return shared_out(runs[1:], plain_s=min(plain_s[1:]), total_s=min(slowest_s[1:]))


def shared_out(runs: Sequence[Seconds], *, plain_s: float, total_s: float) -> Seconds:
    """The total, with what hooks take left out of each segment's share.

    A share is the segment's own fastest run, less what all runs with hooks took longer than those without, divided
    evenly among the segments of forward and of backward that there are.

    Args:
        runs: with hooks.
        plain_s: the fastest run without them, on this rank.
        total_s: what the segments are to add up to.
    """
    forward_s = [min(values) for values in zip(*(run.forward_s for run in runs), strict=True)]
    backward_s = [min(values) for values in zip(*(run.backward_s for run in runs), strict=True)]
    both_s = [*forward_s, *backward_s]
    hook_s = (min(run.total_s for run in runs) - plain_s) / sum(seconds > 0 for seconds in both_s)
    shares = [max(_LEAST_SHARE * seconds, seconds - max(0.0, hook_s)) for seconds in both_s]
    scale = total_s / sum(shares)
    scaled_s = tuple(share * scale for share in shares)
    return Seconds(scaled_s[: len(forward_s)], scaled_s[len(forward_s) :])


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


def _plain_s(device: torch.device, loss_of: Callable[[], Tensor]) -> float:
    synchronize(device)
    start = time.perf_counter()
    loss_of().backward()
    synchronize(device)
    return time.perf_counter() - start


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
