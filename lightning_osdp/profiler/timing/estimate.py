"""Seconds of a step that is not run: its operations one by one, on this device or by another one's rates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from typing_extensions import override

from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.profiler.equal_blocks.repeated import ShortModel
from lightning_osdp.profiler.step.loss import loss_in
from lightning_osdp.profiler.step.run_step import Step
from lightning_osdp.profiler.timing.operation_cost import replayed_s, roofline_s, segment_seconds
from lightning_osdp.profiler.timing.operations import Operation, OperationRecorder
from lightning_osdp.profiler.timing.step_time import Seconds
from lightning_osdp.profiler.tracing.segments import Position, followed


def seconds_on(device: torch.device, rates: DeviceRates | None) -> Callable[[Operation], float]:
    """What one operation takes: measured on the device at hand, or bounded from rates."""
    if rates is None:
        return partial(replayed_s, device=device)
    flops_per_s = {getattr(torch, name): rate for name, rate in rates.flops_per_s.items()}
    return partial(roofline_s, flops_per_s=flops_per_s, bytes_per_s=rates.bytes_per_s)


def estimate_step(step: Step, short: ShortModel, size: int, seconds_of: Callable[[Operation], float]) -> Seconds:
    """Segments of a micro-batch as the sums of their operations, each distinct one of which is asked for once.

    Never more is alive than the operands of one operation.

    Args:
        step: of a model, real or on the meta device.
        short: what stands for it.
        size: samples of the micro-batch.
        seconds_of: seconds of one operation.
    """
    position = Position(short.calls, lambda: None)
    with short.applied():
        modules = dict(step.module.named_modules())
        following = followed(modules, position, short.calls)
        with step.on_fake_tensors(size) as (run, _), _Placed(position) as recorder, following:
            loss = loss_in(run())
            position.start_backward()
            loss.backward()
    seconds, num = segment_seconds(recorder.operations, seconds_of), position.num_segments
    return Seconds(
        forward_s=tuple(short.unfolded([seconds.get(index, 0.0) for index in range(num)])),
        backward_s=tuple(short.unfolded([seconds.get(num + index, 0.0) for index in range(num)])),
    )


class _Placed(OperationRecorder):
    """Books operations where the step is: forward first, then backward."""

    def __init__(self, position: Position) -> None:
        self._position = position
        super().__init__()

    @property
    @override
    def segment(self) -> int:
        """Of forward, or of backward behind them."""
        return self._position.now + self._position.in_backward * self._position.num_segments

    @segment.setter
    def segment(self, _: int) -> None:
        """The position says it."""
