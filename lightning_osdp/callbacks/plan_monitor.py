"""Measurement of step time, samples/s and peak memory in training, for comparison with the plan's predictions."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from rich.console import RenderableType
from typing_extensions import override

from lightning_osdp.callbacks.peak import WARM_UP_STEPS, AllocatorPeaks, PeakCounter, elements_in
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.scheduler import WATCHED_STEPS, Pace
from lightning_osdp.profiler import samples_in
from lightning_osdp.profiler.machine.stopwatch import Mark, between_s, mark, synchronize
from lightning_osdp.report.tables import comparison_table, show

_KEPT_STEPS = 1000
"""Number of latest steps that the medians of the final table are taken over."""
_REFRESH_S = 1.0
"""Seconds between updates of the progress bar that logging does not cause. Lightning takes milliseconds of a CPU for
one, so that nothing is logged then without a bar."""
_NEAR_LIMIT = 0.97
"""Peak over the memory limit from which on it is told, where it is also beyond `_MORE`."""
_MORE = 1.01
"""Peak over the predicted one."""


@dataclass(frozen=True)
class Measured:
    """Measurements of this rank; None where training was too short."""

    step_time_s: float | None = None
    samples_per_s: float | None = None
    peak_bytes: int | None = None
    """Peak of live bytes; on CPU of tensors that the plan predicts."""
    other_bytes: int | None = None
    """Bytes of other tensors that were alive in the counted steps; None on CUDA, whose peak includes them."""
    allocator: AllocatorPeaks | None = None
    """Other numbers of the CUDA caching allocator; None on CPU."""


class PlanMonitor(pl.Callback):
    """Logs measured step time, samples/s and peak memory; prints them beside the plan's predictions when fit ends.

    `OSDPStrategy` adds a monitor by itself; give the Trainer another one to choose the options. These values are logged
    to all loggers of the trainer every ``log_every_n_steps``. Values marked (*) are shown in the progress bar:

    - ``osdp/step_time_s`` (*): seconds of one optimizer step without loading, validation and logging, as the mean of
      all steps since the value was logged last.
    - ``osdp/samples_per_s`` (*): samples of all ranks in a second of these steps.
    - ``osdp/peak_bytes``: peak of live bytes on rank 0, exact on CPU, requested from the caching allocator on CUDA. On
      CPU only tensors that the plan predicts count; other tensors, such as a callback keeps, have their own line in
      the final table if they take a hundredth of the peak. The first step over the memory limit causes a warning.
    - ``osdp/active_bytes``, ``osdp/reserved_bytes``, ``osdp/allocation_retries``: numbers of the allocator on CUDA, see
      `AllocatorPeaks`. The first retry causes a warning. The allocator's peaks are reset at each batch.
    - ``osdp/step_time_ratio`` (*), ``osdp/peak_ratio`` (*): measured over predicted, if the plan has a prediction.
    - ``osdp/racer`` (*): the plan whose turn it is in a race, and after it the winner, by its number in the line that
      begins the race.

    The first steps are left out, and on CPU the steps in which bytes are counted. Training never waits for a
    measurement. It is said once of a plan if 50 steps in a row take 15% longer than its first ones with as large
    batches, or if its peak is within 3% of the memory limit although less was predicted. The monitor adds nothing to
    checkpoints. While plans race, values are those of the plan whose turn it is, and there is no peak; the final table
    is about the steps after the race. Steps under a plan for longer batches are not timed.

    Args:
        progress_bar: True shows values in the progress bar.
        logger: True logs values.

    Raises:
        ConfigurationError: fit runs under a strategy without a plan.
    """

    def __init__(self, *, progress_bar: bool = True, logger: bool = True) -> None:
        self._progress_bar, self._logger = progress_bar, logger
        self._plan: Plan | None = None  # None until training begins
        self._latest: dict[str, float] = {}

    def _begin(self, trainer: pl.Trainer, plan: Plan) -> None:
        device = trainer.strategy.root_device
        self._plan = plan
        self._timer, self._peak = StepTimer(device), PeakCounter(device)
        self._steps: deque[tuple[float, int]] = deque(maxlen=_KEPT_STEPS)
        self._unlogged: list[tuple[float, int]] = []
        self._world_size = trainer.world_size
        self._num_steps, self._global_step, self._is_racing = 0, trainer.global_step, False
        self._shown_s, self._is_over, self._has_retried = 0.0, False, False
        self._pace, self._has_slowed, self._is_near, self._is_away = Pace(), False, False, False
        self._num_elements, self._elements = 0, deque[int]()  # of this step, and of steps that are not finished
        self._watched: list[tuple[float, int]] = []  # seconds and elements of steps that the pace does not have yet
        self._latest = {}

    @property
    def latest(self) -> dict[str, float]:
        """Latest values, by name; they are made when values are logged, and once a second."""
        return dict(self._latest)

    @property
    def measured(self) -> Measured:
        """Measurements of this fit so far: medians over the latest steps, and the peak."""
        if self._plan is None:
            return Measured()
        step_time_s = median(seconds for seconds, _ in self._steps) if self._steps else None
        samples = self._world_size * median(samples for _, samples in self._steps) if self._steps else 0
        return Measured(
            step_time_s=step_time_s,
            samples_per_s=samples / step_time_s if step_time_s else None,
            peak_bytes=self._peak.peak_bytes,
            other_bytes=self._peak.other_bytes,
            allocator=self._peak.allocator,
        )

    @property
    def is_near_limit(self) -> bool:
        """True once the plan in use took nearly all of the memory limit, or more, although less was predicted."""
        return self._plan is not None and (self._is_near or self._is_over)

    def comparison(self) -> RenderableType:
        """Makes a table of predictions beside measurements of this rank."""
        assert self._plan is not None
        measured, more = self.measured, {}
        if measured.allocator is not None:
            more["active memory, rounded up"] = format_bytes(measured.allocator.active_bytes)
            more["reserved memory"] = format_bytes(measured.allocator.reserved_bytes)
            more["allocation retries"] = str(measured.allocator.num_retries)
        return comparison_table(
            self._plan,
            step_time_s=measured.step_time_s,
            samples_per_s=measured.samples_per_s,
            peak_bytes=measured.peak_bytes,
            peak_steps=self._peak.steps,
            other_bytes=measured.other_bytes or 0,
            why_not=f"only {self._num_steps} optimizer step{'' if self._num_steps == 1 else 's'}",
            more=more,
        )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plan = getattr(trainer.strategy, "plan", None)
        if not isinstance(plan, Plan):
            raise ConfigurationError(
                f"Expected a strategy with a plan, whose predictions PlanMonitor checks, got"
                f" {type(trainer.strategy).__name__}. Train with strategy='osdp', or without PlanMonitor."
            )
        self._begin(trainer, plan)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        plan = getattr(trainer.strategy, "plan", None)
        self._is_away = bool(getattr(trainer.strategy, "has_longer_batches", False))
        if plan is not None and plan is not self._plan and not self._is_away:
            self._begin(trainer, plan)  # `change_plan` was called: measurements are of the old plan
        self._is_racing = bool(getattr(trainer.strategy, "is_racing", False))
        self._peak.start(trainer, batch, num_steps=self._num_peak_steps)
        self._timer.start()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        size = 0 if self._plan is None else self._plan.micro_batch_size
        self._timer.stop(num_samples=samples_in(batch, (size,)))
        self._num_elements += elements_in(batch)
        self._peak.stop()
        if trainer.global_step == self._global_step:
            return  # gradients accumulate, and the optimizer step comes later
        self._global_step = trainer.global_step
        warm_up_steps = 1 if self._is_racing else WARM_UP_STEPS
        counts = self._num_steps >= warm_up_steps and not self._peak.is_counting and not self._is_away
        self._timer.end_step(counts=counts)
        if counts:
            self._elements.append(self._num_elements)
        self._num_elements = 0
        self._peak.end_step(num_steps=self._num_peak_steps)
        self._warn_over_limit(trainer)
        self._tell_near_limit()
        self._warn_of_retries(trainer)
        self._num_steps += 1
        is_due = trainer._logger_connector.should_update_logs
        # alike on all ranks, of which one shows it: who stops training by a metric finds it on all ranks, or on none
        has_bar = self._progress_bar and trainer.progress_bar_callback is not None
        if is_due or time.perf_counter() - self._shown_s > _REFRESH_S:
            self._update(getattr(trainer.strategy, "racer", None))
            if is_due or has_bar:
                self._log(pl_module)
            self._shown_s = time.perf_counter()
        if is_due:  # true on all ranks at once, as they end steps together
            self._unlogged = []

    @property
    def _num_peak_steps(self) -> int:
        """Steps so far, as far as peaks go: counting bytes would slow down the steps by which plans are compared."""
        return 0 if self._is_racing else self._num_steps

    def _warn_over_limit(self, trainer: pl.Trainer) -> None:
        """Warns, once, of the first step over the memory limit."""
        assert self._plan is not None
        peak_bytes, limit_bytes = self._peak.peak_bytes or 0, self._plan.memory_limit_bytes
        if peak_bytes > limit_bytes and not self._is_over:
            self._is_over = True
            warnings.warn(
                f"OSDP: step {self._num_steps + 1} took {format_bytes(peak_bytes)} on rank {trainer.global_rank}, over"
                f" memory_limit ({format_bytes(limit_bytes)}); {format_bytes(self._plan.peak_bytes)} was predicted of"
                " the batch that was profiled. Where batches differ, give the largest: profile_batch='longest'.",
                stacklevel=2,
            )

    def _tell_near_limit(self) -> None:
        """Tells, once, that hardly anything of the memory limit is left although more was predicted to be."""
        assert self._plan is not None
        peak_bytes, limit_bytes = self._peak.peak_bytes or 0, self._plan.memory_limit_bytes
        nearest_bytes = max(_NEAR_LIMIT * limit_bytes, _MORE * self._plan.peak_bytes)
        if nearest_bytes < peak_bytes <= limit_bytes and not self._is_near:
            self._is_near = True
            rank_zero_info(
                f"OSDP: step {self._num_steps + 1} took {format_bytes(peak_bytes)} on rank 0, which leaves"
                f" {format_bytes(limit_bytes - peak_bytes)} of memory_limit ({format_bytes(limit_bytes)});"
                f" {format_bytes(self._plan.peak_bytes)} was predicted."
            )

    def _warn_of_retries(self, trainer: pl.Trainer) -> None:
        """Warns, once, of the first step in which the allocator returned its cache to the device."""
        peaks = self._peak.allocator
        if peaks is not None and peaks.num_retries and not self._has_retried:
            self._has_retried = True
            warnings.warn(
                f"OSDP: in step {self._num_steps + 1} memory of rank {trainer.global_rank} was short until its"
                " allocator had given back what it cached, for which the device stops:"
                f" {format_bytes(peaks.active_bytes)} were in use at most, and {format_bytes(peaks.reserved_bytes)}"
                " reserved. Pass a lower memory_limit, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against"
                " fragmentation.",
                stacklevel=2,
            )

    def _take_finished(self, *, wait: bool = False) -> None:
        finished = list(self._timer.finished(wait=wait))
        self._steps.extend(finished)
        self._unlogged += finished
        self._watched += [(seconds, self._elements.popleft()) for seconds, _ in finished]
        while len(self._watched) >= WATCHED_STEPS:
            self._pace = self._pace.after(self._watched[:WATCHED_STEPS])
            del self._watched[:WATCHED_STEPS]
            self._tell_slower()

    def _tell_slower(self) -> None:
        """Tells, once, that steps take longer than the plan's first ones."""
        if self._pace.is_slower and not self._has_slowed:
            self._has_slowed = True
            rank_zero_info(
                f"OSDP: a step takes {format_seconds(self._pace.latest_s)}, the median of the last {WATCHED_STEPS}, and"
                f" took {format_seconds(self._pace.accepted_s)} in the plan's first ones: something else may use the"
                " device or the links."
            )

    def _update(self, racer: int | None) -> None:
        """Has `latest` tell of the steps so far."""
        assert self._plan is not None
        self._take_finished()
        if self._unlogged:  # not in an interval in which no step was measured
            seconds = sum(seconds for seconds, _ in self._unlogged)
            step_time_s = seconds / len(self._unlogged)
            self._latest["osdp/step_time_s"] = step_time_s
            self._latest["osdp/samples_per_s"] = (
                self._world_size * sum(samples for _, samples in self._unlogged) / seconds
            )
            if self._plan.step_time_s > 0:
                self._latest["osdp/step_time_ratio"] = step_time_s / self._plan.step_time_s
        if self._latest and self._peak.peak_bytes is not None:
            self._latest["osdp/peak_bytes"] = self._peak.peak_bytes
            if self._plan.peak_bytes > 0:
                self._latest["osdp/peak_ratio"] = self._peak.peak_bytes / self._plan.peak_bytes
            if self._peak.allocator is not None:
                self._latest["osdp/active_bytes"] = self._peak.allocator.active_bytes
                self._latest["osdp/reserved_bytes"] = self._peak.allocator.reserved_bytes
                self._latest["osdp/allocation_retries"] = self._peak.allocator.num_retries
        if racer is not None:
            self._latest["osdp/racer"] = racer

    def _log(self, pl_module: pl.LightningModule) -> None:
        for name, value in self._latest.items():
            in_bar = self._progress_bar and not name.endswith(("_bytes", "_retries"))
            is_logged = self._logger and bool(pl_module.trainer.loggers)  # Lightning warns where there is none
            pl_module.log(
                name,
                # Lightning would copy a number to the device, and training would wait for the copy
                torch.tensor(value, dtype=torch.float64, device="cpu"),
                on_step=True,
                on_epoch=False,
                prog_bar=in_bar,
                logger=is_logged,
            )

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._plan is None:
            return
        self._take_finished(wait=True)
        if trainer.is_global_zero and not self._is_racing:  # else the last turn's plan is not the one that stays
            show(self.comparison())

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._plan is not None:  # None where the error came before training
            self._peak.stop()


class StepTimer:
    """Timer of optimizer steps that sums the seconds of their batches and never waits for the device.

    On CUDA, events mark when the device, not Python, begins and ends a batch; a step is finished once the device has
    passed its events. On CPU, operations have ended when they return, and Python's clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin: Mark | None = None
        self._spans: list[tuple[Mark, Mark]] = []
        self._num_samples = 0
        self._ended: deque[tuple[list[tuple[Mark, Mark]], int]] = deque()
        """Spans and samples of each step that `finished` has not yielded."""

    def start(self) -> None:
        """Begins a batch."""
        self._begin = mark(self._device)

    def stop(self, *, num_samples: int) -> None:
        """Ends the batch that was begun."""
        assert self._begin is not None
        self._spans.append((self._begin, mark(self._device)))
        self._num_samples += num_samples
        self._begin = None

    def end_step(self, *, counts: bool = True) -> None:
        """Ends an optimizer step that had all batches since the last call; `finished` yields it only if it counts."""
        if counts:
            self._ended.append((self._spans, self._num_samples))
        self._spans, self._num_samples = [], 0

    def finished(self, *, wait: bool = False) -> Iterator[tuple[float, int]]:
        """Yields seconds and samples of each new step that the device has finished, oldest first.

        With ``wait`` the device finishes all steps first; do not wait while training goes on.
        """
        if wait:
            synchronize(self._device)
        while self._ended:
            spans, num_samples = self._ended[0]
            last = spans[-1][1]  # events of one stream pass in order
            if not isinstance(last, float) and not last.query():
                return
            self._ended.popleft()
            yield sum(between_s(*span) for span in spans), num_samples
