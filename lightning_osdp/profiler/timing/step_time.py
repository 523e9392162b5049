"""Seconds of each segment of a step, on the device that trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from lightning_osdp.core.text.progress import Progress, silent
from lightning_osdp.profiler.machine.memory import is_out_of_memory
from lightning_osdp.profiler.machine.stopwatch import Mark, between_s, mark, synchronize
from lightning_osdp.profiler.step.run_step import check_finite
from lightning_osdp.profiler.tracing.calls import Calls, Position, followed

T = TypeVar("T")

_REPEATS = 5
_REPEAT_BUDGET_S = 3.0
"""Runs that together take longer than this are not repeated further."""
_LEAST_SHARE = 0.1
"""Least share of a segment's own work in its seconds with hooks."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of each segment, the loss last."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Seconds of the whole micro-batch."""
        return sum(self.forward_s) + sum(self.backward_s)


class Together(Protocol):
    """Runs a function on every rank once all ranks have come to it; called in one order on all ranks."""

    def __call__(self, work: Callable[[], T], /, *, stage: str) -> Sequence[T]:
        """Results of the function, by rank; where it raises on one rank, every rank raises.

        ``stage`` names the purpose, and is equal on all ranks.
        """


def alone(work: Callable[[], T], /, *, stage: str) -> Sequence[T]:
    """Runs a function on this rank, whatever other ranks do."""
    return [work()]


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
    """Seconds of segments in the fastest of a few forwards and backwards, after one to warm up.

    Hooks tell segments apart and take time themselves, so a run without hooks follows each run with hooks. The first
    run with hooks warms up; the first one without hooks counts, for a step that takes long has only one more. Ranks run
    at the same time, as they do when they train: ranks that share cores, a bus or a power limit slow each other down.
    The total is that of the fastest run without hooks on the slowest rank, see `shared_out` for its parts.

    Returns:
        None on every rank where the device of one has too little memory.

    Raises:
        ProfileError: the loss is not finite.
    """
    start = time.perf_counter()
    runs: list[Seconds] = []
    plain_s: list[float] = []
    slowest_s: list[float] = []

    def with_hooks() -> float:
        runs.append(_timed(module, calls, device, loss_of))
        return runs[-1].total_s

    def without_hooks() -> float:
        synchronize(device)
        before = mark(device)
        loss_of().backward()
        after = mark(device)
        synchronize(device)
        plain_s.append(between_s(before, after))
        return plain_s[-1]

    def attempt(run: Callable[[], float]) -> tuple[float, float] | None:
        try:
            return run(), time.perf_counter() - start
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None

    def on_all_ranks(run: Callable[[], float]) -> list[tuple[float, float]] | None:
        module.zero_grad()  # adding to gradients that are there already would take more time
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
    return shared_out(runs[1:], plain_s=min(plain_s), total_s=min(slowest_s))


def shared_out(runs: Sequence[Seconds], *, plain_s: float, total_s: float) -> Seconds:
    """Seconds of segments that add up to ``total_s``, in proportion to the segments' seconds without hooks.

    Seconds of a segment without hooks are those of its fastest run, less the seconds of its hooks. Hooks take the
    difference between the fastest run with them and ``plain_s``, the fastest run without. The segments of forward and
    backward that ran share this difference evenly.
    """
    forward_s = [min(values) for values in zip(*(run.forward_s for run in runs), strict=True)]
    backward_s = [min(values) for values in zip(*(run.backward_s for run in runs), strict=True)]
    both_s = [*forward_s, *backward_s]
    hook_s = (min(run.total_s for run in runs) - plain_s) / sum(seconds > 0 for seconds in both_s)
    shares = [max(_LEAST_SHARE * seconds, seconds - max(0.0, hook_s)) for seconds in both_s]
    scale = total_s / sum(shares)
    scaled_s = tuple(share * scale for share in shares)
    return Seconds(scaled_s[: len(forward_s)], scaled_s[len(forward_s) :])


def _timed(module: nn.Module, calls: Calls, device: torch.device, loss_of: Callable[[], Tensor]) -> Seconds:
    marks: list[tuple[bool, int, Mark]] = []
    position = Position(calls, lambda: marks.append((position.in_backward, position.now, mark(device))))
    with followed(module, position):
        synchronize(device)
        before = mark(device)
        loss = loss_of()
        position.start_backward()
        loss.backward()
        position.end()
    check_finite(loss)
    synchronize(device)
    forward_s, backward_s = [0.0] * position.num_segments, [0.0] * position.num_segments
    for in_backward, segment, now in marks:
        (backward_s if in_backward else forward_s)[segment] += between_s(before, now)
        before = now
    return Seconds(tuple(forward_s), tuple(backward_s))
